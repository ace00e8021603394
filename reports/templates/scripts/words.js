"use strict";
// Puts numbers and trials into words, as reports/units.py does: for hovers, the panel and the table.
report.words = (() => {
  const { study, namesOf } = report;
  const dash = "–";
  const isKnown = (value) => value !== undefined && value !== null;
  const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const units = {
    rate: (value) => (Math.abs(value) >= 100 ? grouped.format(value) : value.toFixed(1)),
    memory: (value) => `${value.toFixed(2)} ${study.memory_unit}`,
    usd: (value) => `$${Number(value.toPrecision(3))}`,
    count: (value) => grouped.format(value),
    number: (value) => String(Number(value.toPrecision(4))),
    seconds: (value) => (value >= 0.1 ? `${value.toPrecision(3)} s` : `${(1000 * value).toPrecision(3)} ms`),
  };
  const number = (value, unit) => (isKnown(value) ? units[unit](value) : dash);
  const between = (low, high) => (isKnown(low) && isKnown(high) ? `${number(low, "rate")}–${number(high, "rate")}` : "");

  const speed = (value, low, high, remark) => {
    const details = [between(low, high), remark].filter(Boolean).join(", ");
    return `${number(value, "rate")} tokens/s${details ? ` (${details})` : ""}`;
  };
  const needOf = (trial) => {
    if (!isKnown(trial.need)) return "";
    return `${trial.need_is_lower_bound ? "at least " : ""}${number(trial.need, "memory")}${trial.need_is_predicted ? " by prediction" : ""}`;
  };
  const titleOf = (trial) => `Trial ${trial.number}: ${study.verdicts[trial.verdict]}`;
  const badgesOf = (trial) => [...namesOf.get(trial.number), ...(trial.carried_from ? [`carried over from ${trial.carried_from}`] : [])];

  // What is known of a trial, as pairs of a name and its words; the first are what a hover shows.
  const factsOf = (trial) => {
    const isPredicted = trial.target_basis === "predicted";
    const again = trial.is_measured_again ? "measured again" : "";
    return [
      isPredicted && [`on ${study.gpu}`, speed(trial.target_tokens_per_second, trial.target_low, trial.target_high, "predicted")],
      isKnown(trial.tokens_per_second) && ["measured",
        speed(trial.tokens_per_second, trial.tokens_per_second_low, trial.tokens_per_second_high, [again, trial.doubts].filter(Boolean).join(", "))],
      isKnown(trial.peak_allocated) && ["peak memory", `${number(trial.peak_allocated, "memory")} of ${number(study.budget, "memory")}`],
      needOf(trial) && ["needs", needOf(trial)],
      isKnown(trial.usd_per_million_tokens) && ["a million tokens", number(trial.usd_per_million_tokens, "usd")],
      ["against the baseline", trial.changes],
      ["class", trial.class],
      trial.reason && ["why", trial.reason],
    ].filter(Boolean);
  };
  const detailsOf = (trial) => [
    ...factsOf(trial).filter(([name]) => name !== "why" || !trial.error),
    isKnown(trial.trainable_parameters) && ["trainable parameters", number(trial.trainable_parameters, "count")],
    isKnown(trial.final_loss) && ["final loss", number(trial.final_loss, "number")],
    isKnown(trial.peak_reserved) && ["reserved", number(trial.peak_reserved, "memory")],
    isKnown(trial.step_seconds) && ["a step", number(trial.step_seconds, "seconds")],
    isKnown(trial.predicted_peak) && ["predicted peak", number(trial.predicted_peak, "memory")],
    isKnown(trial.joules_per_token) && ["energy of a token", `${Number((1000 * trial.joules_per_token).toPrecision(3))} mJ`],
    trial.faithful && ["8-bit compute", trial.faithful],
    trial.flags && ["flags", trial.flags.join(", ")],
    trial.error && ["why", trial.error],
  ].filter(Boolean);

  return { dash, isKnown, number, needOf, titleOf, badgesOf, factsOf, detailsOf };
})();
