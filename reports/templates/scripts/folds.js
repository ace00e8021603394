"use strict";
// Unfolds what is folded on paper.
(() => {
  const folds = [...document.querySelectorAll("details.fold")];
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = folds.filter((fold) => !fold.open);
    for (const fold of closed) fold.open = true;
  });
  addEventListener("afterprint", () => closed.forEach((fold) => { fold.open = false; }));
})();
