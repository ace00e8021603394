"use strict";
// Lets the cells of the wall pin the trial that they speak of, by click or Enter.
(() => {
  const { selection, rowOf } = report;
  const cells = [...document.querySelectorAll(".wall td[data-trial]")].filter((cell) => rowOf.has(Number(cell.dataset.trial)));
  for (const cell of cells) {
    const row = rowOf.get(Number(cell.dataset.trial));
    cell.tabIndex = 0;
    cell.addEventListener("click", () => selection.toggle(row));
    cell.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      selection.toggle(row);
      event.preventDefault();
    });
    selection.listen((pinned) => cell.classList.toggle("pinned", pinned === row));
  }
})();
