"use strict";
// Shows one panel of the out-of-memory boundary at a time. Its cells pin the trial that they speak of, by click or
// Enter; Tab reaches a panel once, and the arrows go on from there.
(() => {
  const { selection, rowOf } = report;
  const panels = [...document.querySelectorAll(".walls > *")];
  const form = document.getElementById("wall-choice");
  const choose = () => panels.forEach((panel, n) => { panel.hidden = n !== Number(form.querySelector("select").value); });
  if (panels.length > 1) {
    form.hidden = false;
    form.addEventListener("input", choose);
    choose();
  }
  const cells = [...document.querySelectorAll(".wall td[data-trial]")].filter((cell) => rowOf.has(Number(cell.dataset.trial)));
  for (const cell of cells) {
    const row = rowOf.get(Number(cell.dataset.trial));
    const panel = [...cell.closest("table").querySelectorAll("td[data-trial]")].filter((other) => cells.includes(other));
    cell.tabIndex = panel[0] === cell ? 0 : -1;
    cell.addEventListener("click", () => selection.toggle(row));
    cell.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = panel[panel.indexOf(cell) + step];
      if (next) {
        cell.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      } else if (event.key === "Enter") selection.toggle(row, cell);
      else return;
      event.preventDefault();
    });
    selection.listen((pinned) => cell.classList.toggle("pinned", pinned === row));
  }
})();
