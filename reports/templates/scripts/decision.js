"use strict";
// Says of each card what the reader's own training costs and takes, as the cards say of the tokens asked for.
(() => {
  const input = document.getElementById("job-tokens");
  if (input === null) return;
  const number = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const usd = (dollars) => `$${dollars >= 1 ? number(dollars, 2) : dollars.toFixed(2 - Math.floor(Math.log10(dollars)))}`;
  const duration = (seconds) => {
    if (seconds < 60) return `${number(seconds, 0)} s`;
    return seconds < 3600 ? `${number(seconds / 60, 0)} min` : `${number(seconds / 3600, 1)} h`;
  };

  const words = (job, tokens) => {
    const took = duration(tokens / Number(job.dataset.speed));
    if (job.dataset.usd === undefined) return took;
    const [dollars, low, high] = job.dataset.usd.split(" ").map((perMillion) => usd((Number(perMillion) * tokens) / 1e6));
    const within = low === undefined ? "" : ` (${low}–${high.slice(1)})`;
    return `${dollars}${within}, ${took}`;
  };
  input.addEventListener("input", () => {
    const tokens = Number(input.value);
    const isUsable = Number.isFinite(tokens) && tokens > 0;
    for (const job of document.querySelectorAll(".job")) job.textContent = isUsable ? words(job, tokens) : "–";
  });
})();
