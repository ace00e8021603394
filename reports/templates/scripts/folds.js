"use strict";
// Draws the figures of a folded part once it is unfolded: before, they have no width. On paper nothing is folded.
(() => {
  const folds = [...document.querySelectorAll("details.fold")];
  const drawIn = (fold) => fold.querySelectorAll(".figure").forEach((holder) => report.unfold(holder.id));
  for (const fold of folds) fold.addEventListener("toggle", () => fold.open && drawIn(fold));
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = folds.filter((fold) => !fold.open);
    for (const fold of closed) fold.open = true;
  });
  addEventListener("afterprint", () => closed.forEach((fold) => { fold.open = false; }));
})();
