"use strict";
// Reads the page's data, and replaces references to trials by their values, as reports/figures/figure.py does.
const report = (() => {
  const { document: study, figures, themes } = JSON.parse(document.getElementById("page-data").textContent);

  const isReference = (part) => typeof part === "string" && part.startsWith("@");
  const isMapping = (part) => part !== null && typeof part === "object" && !Array.isArray(part);
  const valueOf = (part, chosen) => {
    if (isReference(part)) {
      const [key, place] = part.slice(1).split(".");
      return chosen.map((trial) => (place ? trial[key][place] : trial[key]) ?? null);
    }
    if (!isMapping(part)) return part;
    return Object.fromEntries(Object.entries(part).map(([key, inner]) => [key, valueOf(inner, chosen)]));
  };
  // A trace without rows refers to nothing: what is the user's may begin with an @ there.
  const resolveTrace = ({ rows, ...trace }) => {
    if (!rows) return trace;
    const chosen = rows.map((row) => study.trials[row]);
    // The page explains marks itself, by the row that each stands for.
    return { ...valueOf(trace, chosen), customdata: rows, ...(trace.path && pathOf(trace.path, rows, chosen)) };
  };
  const pathOf = (path, rows, chosen) => {
    const columns = path.map(({ of, low, span }) => valueOf(of, chosen).map((value) => (value - low) / span));
    const along = (stops) => rows.flatMap((row, n) => [...stops(row, n), null]);
    return { path: undefined, x: along(() => [...path.keys()]), y: along((_, n) => columns.map((column) => column[n])), customdata: along((row) => path.map(() => row)) };
  };

  const rowOf = new Map(study.trials.map((trial, row) => [trial.number, row]));
  const namesOf = new Map(study.trials.map((trial) => [trial.number, []]));
  for (const [name, numbers] of Object.entries(study.named)) {
    for (const number of numbers) namesOf.get(number)?.push(name);
  }
  const configOf = (trial) => ({ ...study.recipe, ...trial.config });

  return { study, figures, themes, resolveTrace, rowOf, namesOf, configOf };
})();
