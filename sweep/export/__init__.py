"""The record of a trial, and files that train it; `formats` is the way in."""
