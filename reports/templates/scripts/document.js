"use strict";
// Reads the page's data, and replaces references to trials by their values, as reports/figures/figure.py does.
const report = (() => {
  const { document: study, figures, themes } = JSON.parse(document.getElementById("page-data").textContent);

  const isReference = (part) => typeof part === "string" && part.startsWith("@");
  const isMapping = (part) => part !== null && typeof part === "object" && !Array.isArray(part);
  const valueOf = (part, chosen) => {
    if (isReference(part)) return chosen.map((trial) => trial[part.slice(1)] ?? null);
    if (!isMapping(part)) return part;
    return Object.fromEntries(Object.entries(part).map(([key, inner]) => [key, valueOf(inner, chosen)]));
  };
  // A trace without rows refers to nothing: what is the user's may begin with an @ there.
  const resolveTrace = ({ rows, ...trace }) => {
    if (!rows) return trace;
    // The page explains marks itself, by the row that each stands for.
    return { ...valueOf(trace, rows.map((row) => study.trials[row])), customdata: rows };
  };

  const rowOf = new Map(study.trials.map((trial, row) => [trial.number, row]));
  const namesOf = new Map(study.trials.map((trial) => [trial.number, []]));
  for (const [name, numbers] of Object.entries(study.named)) {
    for (const number of numbers) namesOf.get(number)?.push(name);
  }
  const configOf = (trial) => ({ ...study.recipe, ...trial.config });

  return { study, figures, themes, resolveTrace, rowOf, namesOf, configOf };
})();
