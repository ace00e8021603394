"use strict";
// Draws the page, once everything that has a say in it is there.
report.start();
