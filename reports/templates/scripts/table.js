"use strict";
// The table of all trials: its columns are chosen, its rows sorted, filtered, pinned and downloaded as they stand.
(() => {
  const holder = document.getElementById("trials-table");
  if (!holder) return;
  const { study, words, selection, box, element, rowOf, configOf } = report;
  const { isKnown, number } = words;
  const PAGE = 50;
  const form = document.getElementById("trials-controls");
  const more = document.getElementById("trials-more");

  const measured = Object.entries(study.columns).map(([key, { label, unit }]) => ({ key, label, isNumber: true, words: (trial) => number(trial[key], unit) }));
  const varying = new Set(study.axes.map(({ key }) => key));
  const settingOf = (trial, key) => (key in trial.config ? trial.config[key] : study.recipe[key]);
  const settings = Object.entries(study.settings).map(([key, label]) => ({
    key, label, isHidden: !varying.has(key), isNumber: typeof study.recipe[key] === "number",
    of: (trial) => settingOf(trial, key), words: (trial) => String(settingOf(trial, key) ?? words.dash),
  }));
  const columns = [
    { key: "number", label: "trial", isNumber: true, words: (trial) => String(trial.number) },
    { key: "verdict", label: "ended", words: (trial) => study.verdicts[trial.verdict] },
    ...measured,
    { key: "need", label: "needs", isNumber: true, words: (trial) => words.needOf(trial) || words.dash },
    { key: "changes", label: "against the baseline", isHidden: true, words: (trial) => trial.changes },
    ...settings,
  ].map((column) => ({ of: (trial) => trial[column.key], ...column })).filter(({ of, isHidden }) => isHidden || study.trials.some((trial) => isKnown(of(trial))));
  const visible = () => columns.filter(({ isHidden }) => !isHidden);
  const first = measured.find(({ key }) => key.endsWith("tokens_per_second"));
  const state = { key: first?.key ?? "number", falls: Boolean(first), text: "", verdict: "", shown: PAGE };

  const haystacks = study.trials.map((trial) => [
    `trial ${trial.number}`, trial.changes, trial.class, study.verdicts[trial.verdict], trial.reason, trial.error, trial.doubts, ...(trial.flags ?? []),
    ...words.badgesOf(trial), ...Object.entries(configOf(trial)).map(([key, value]) => `${key}: ${value}`),
  ].filter(Boolean).join("\n").toLowerCase());
  const isWanted = (trial, row) => (box.rows?.has(row) ?? true) && (!state.verdict || trial.verdict === state.verdict)
    && state.text.toLowerCase().split(/[\s,]+/).every((word) => haystacks[row].includes(word));
  // What is not known comes last, whichever way the rest goes.
  const compare = (a, b) => {
    const { of } = columns.find(({ key }) => key === state.key);
    const [x, y] = [of(a), of(b)];
    if (!isKnown(x) || !isKnown(y)) return isKnown(y) - isKnown(x) || a.number - b.number;
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (state.falls ? -order : order) || a.number - b.number;
  };
  const chosen = () => study.trials.filter(isWanted).sort(compare);

  const cellOf = (trial, column) => {
    const cell = element("td", column.words(trial), column.isNumber ? "number" : "");
    cell.dataset.label = column.label;
    if (column.key === "verdict") cell.append(...words.badgesOf(trial).map((name) => element("span", name, "badge")));
    if (column.key === "verdict" && (trial.error || trial.reason)) cell.append(reasonOf(trial));
    return cell;
  };
  const reasonOf = ({ reason, error }) => {
    if (!error) return element("div", reason, "caption");
    const whole = element("details");
    whole.append(element("summary", reason ?? "why"), element("pre", error));
    return whole;
  };
  const rowFor = (trial) => {
    const line = element("tr");
    line.tabIndex = -1;
    line.dataset.row = rowOf.get(trial.number);
    line.setAttribute("aria-selected", String(Number(line.dataset.row) === selection.pinned));
    line.append(...visible().map((column) => cellOf(trial, column)));
    return line;
  };
  const headOf = (column) => {
    const head = element("th", "", column.isNumber ? "number" : "");
    const isSorted = column.key === state.key;
    head.scope = "col";
    head.setAttribute("aria-sort", isSorted ? (state.falls ? "descending" : "ascending") : "none");
    const button = element("button", `${column.label}${isSorted ? (state.falls ? " ↓" : " ↑") : ""}`, "sort");
    button.type = "button";
    button.dataset.sort = column.key;
    head.append(button);
    return head;
  };
  // One row of the table is reached by Tab, the others from there by the arrows.
  const enter = (line) => {
    for (const other of body.querySelectorAll('tr[tabindex="0"]')) other.tabIndex = -1;
    if (line) line.tabIndex = 0;
  };
  const plural = (count) => `${count.toLocaleString("en-US")} ${count === 1 ? "trial" : "trials"}`;

  const table = element("table", "", "cards trials");
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  const showRows = () => {
    const trials = chosen();
    const pinned = trials.findIndex((trial) => rowOf.get(trial.number) === selection.pinned);
    state.shown = Math.max(state.shown, pinned + 1);
    body.replaceChildren(...trials.slice(0, state.shown).map(rowFor));
    enter(body.querySelector('[aria-selected="true"]') ?? body.rows[0]);
    const total = study.trials.length;
    const some = trials.length === total ? `${plural(total)} in all` : `${trials.length.toLocaleString("en-US")} of ${plural(total)}`;
    document.getElementById("trials-count").textContent = trials.length > state.shown ? `${some}, the first ${state.shown} are listed.` : `${some}.`;
    more.hidden = trials.length <= state.shown;
    more.textContent = `Show ${Math.min(200, trials.length - state.shown)} more`;
  };
  const show = () => {
    head.replaceChildren(...visible().map(headOf));
    sorting.value = state.key;
    turning.textContent = state.falls ? "↓" : "↑";
    turning.setAttribute("aria-label", state.falls ? "falling; turn" : "rising; turn");
    showRows();
  };
  const mark = (row) => {
    if (row !== null && !body.querySelector(`[data-row="${row}"]`)) showRows();
    for (const line of body.rows) line.setAttribute("aria-selected", String(Number(line.dataset.row) === row));
  };

  const sortBy = (key) => {
    const isNumber = columns.find((column) => column.key === key).isNumber && key !== "number";
    state.falls = key === state.key ? !state.falls : isNumber;
    state.key = key;
    show();
  };
  head.addEventListener("click", ({ target: { dataset: { sort } } }) => {
    if (!sort) return;
    sortBy(sort);
    head.querySelector(`[data-sort="${sort}"]`)?.focus();
  });
  // A narrow screen has no heads of columns to press.
  const sorting = element("select");
  sorting.append(...columns.map(({ key, label }) => Object.assign(element("option", label), { value: key })));
  const turning = Object.assign(element("button"), { type: "button" });
  const sorter = element("label", "sort by ", "narrow");
  sorter.append(sorting, turning);
  sorting.addEventListener("input", (event) => {
    event.stopPropagation();
    sortBy(sorting.value);
  });
  turning.addEventListener("click", () => sortBy(state.key));
  const chooser = element("details", "", "chooser");
  chooser.append(element("summary", "Columns"), ...columns.map((column) => {
    const tick = Object.assign(element("input"), { type: "checkbox", checked: !column.isHidden });
    tick.addEventListener("input", (event) => {
      event.stopPropagation();
      column.isHidden = !tick.checked;
      show();
    });
    const choice = element("label");
    choice.append(tick, column.label);
    return choice;
  }));
  form.append(sorter, chooser);
  body.addEventListener("click", ({ target }) => {
    const line = target.closest("tr");
    if (!line || target.closest("details")) return;
    enter(line);
    selection.toggle(Number(line.dataset.row));
  });
  body.addEventListener("keydown", (event) => {
    const line = event.target;
    if (line.tagName !== "TR") return;
    const next = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
    if (next) {
      enter(next);
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") selection.toggle(Number(line.dataset.row), line);
    else return;
    event.preventDefault();
  });
  form.addEventListener("input", ({ target }) => {
    state[target.name] = target.value.trim();
    state.shown = PAGE;
    showRows();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    state.shown += 200;
    showRows();
  });
  selection.listen(mark);
  box.listen(() => {
    state.shown = PAGE;
    showRows();
  });

  // A spreadsheet would run a text that begins like a formula.
  const quoted = (value) => {
    const text = isKnown(value) ? (typeof value === "object" ? JSON.stringify(value) : String(value)) : "";
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const MEMORY = new Set(["need", "peak_allocated", "peak_reserved", "predicted_peak"]);
  const named = ({ at, config, ...trial }) => Object.fromEntries(Object.entries(trial).map(([key, value]) => [MEMORY.has(key) ? `${key}_${study.memory_unit.toLowerCase()}` : key, value]));
  const flat = (trial) => ({ ...named(trial), ...configOf(trial) });
  const csv = (trials) => {
    const keys = [...new Set(trials.flatMap((trial) => Object.keys(flat(trial))))];
    return [keys, ...trials.map((trial) => keys.map((key) => flat(trial)[key]))].map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
  };
  const json = (trials) => `${JSON.stringify(trials.map((trial) => ({ ...named(trial), config: configOf(trial) })), null, 1)}\n`;
  // A space that holds the trials: what they differ in is searched, the rest is fixed. YAML reads JSON's values.
  const yaml = (trials) => {
    const configs = trials.map(configOf);
    const values = (key) => [...new Set(configs.map((config) => JSON.stringify(config[key])))];
    const varying = Object.keys(study.recipe).filter((key) => values(key).length > 1);
    const searched = varying.length ? varying : ["micro_batch_size"];
    const line = ([key, value]) => `${key}: ${JSON.stringify(value)}`;
    const order = (texts) => texts.map((text) => JSON.parse(text)).sort((a, b) => (typeof a === "number" ? a - b : 0)).map((value) => JSON.stringify(value));
    return [
      `# ${plural(trials.length)} of a study, and what lies between them: sweep run THIS-FILE.yaml`,
      "name: selection", ...Object.entries(study.space).map(line),
      "dimensions:", ...searched.map((key) => `  ${key}: [${order(values(key)).join(", ")}]`),
      "fixed:", ...Object.entries(configs[0]).filter(([key]) => !searched.includes(key)).map((pair) => `  ${line(pair)}`),
      "baseline:", ...Object.entries(study.recipe).map((pair) => `  ${line(pair)}`), "",
    ].join("\n");
  };
  const FORMATS = { csv: [csv, "text/csv"], json: [json, "application/json"], yaml: [yaml, "application/yaml"] };
  const downloads = document.getElementById("trials-downloads");
  downloads.addEventListener("click", ({ target }) => {
    const [write, type] = FORMATS[target.dataset.download] ?? [];
    const trials = chosen();
    if (!write || !trials.length) return;
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([write(trials)], { type: `${type};charset=utf-8` }));
    link.download = `trials.${target.dataset.download}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  holder.append(table);
  form.hidden = false;
  downloads.hidden = false;
  show();
})();
