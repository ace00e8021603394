"use strict";
// Gives each row of the slice plot as many settings as the width has room for.
report.choices.slice = ({ data, layout }, width) => {
  const columns = Math.max(1, Math.min(data.length, Math.floor(width / 250)));
  const rows = Math.ceil(data.length / columns);
  return { data, layout: { ...layout, grid: { ...layout.grid, rows, columns }, height: 90 + 230 * rows } };
};
