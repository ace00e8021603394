"use strict";
// The table of all trials: its columns are chosen, its rows sorted, filtered, pinned and downloaded as they stand.
(() => {
  const holder = document.getElementById("trials-table");
  if (!holder) return;
  const { columns, settings, space, baseline, numbers, valueOf, wordsOf, element, pinned, box, attend } = report;
  const PAGE = 50;
  const keys = Object.keys(columns);
  const [form, more, count, downloads] = ["controls", "more", "count", "downloads"].map((name) => document.getElementById(`trials-${name}`));
  const state = { key: keys.includes("order") ? "order" : "number", falls: false, text: "", verdict: "", shown: PAGE };
  const isNumber = (key) => columns[key].pairs.some(([value]) => typeof value === "number");
  const visible = () => keys.filter((key) => columns[key].shown);
  const label = (key) => columns[key].label;

  const haystacks = numbers.map((number, row) => [`trial ${number}`, ...keys.map((key) => (settings.includes(key) ? `${key}: ${valueOf(key, row)}` : wordsOf(key, row)))].join("\n").toLowerCase());
  const isWanted = (row) => (box.value?.has(numbers[row]) ?? true) && (!state.verdict || valueOf("verdict", row) === state.verdict)
    && state.text.toLowerCase().split(/[\s,]+/).every((word) => haystacks[row].includes(word));
  // What is not known comes last, whichever way the rest goes.
  const compare = (a, b) => {
    const [x, y] = [valueOf(state.key, a), valueOf(state.key, b)];
    if (x === null || y === null) return (x === null) - (y === null) || numbers[a] - numbers[b];
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (state.falls ? -order : order) || numbers[a] - numbers[b];
  };
  const chosen = () => [...numbers.keys()].filter(isWanted).sort(compare);

  const table = element("table", "", "cards trials");
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  const { enter } = attend(body);
  const cellOf = (key, row) => {
    const cell = element("td", wordsOf(key, row) || "–", isNumber(key) ? "number" : "");
    cell.dataset.label = label(key);
    return cell;
  };
  const rowFor = (row) => {
    const line = element("tr");
    line.dataset.trial = numbers[row];
    line.setAttribute("aria-selected", String(numbers[row] === pinned.value));
    line.append(...visible().map((key) => cellOf(key, row)));
    return line;
  };
  const showRows = () => {
    const rows = chosen();
    state.shown = Math.max(state.shown, rows.findIndex((row) => numbers[row] === pinned.value) + 1);
    body.replaceChildren(...rows.slice(0, state.shown).map(rowFor));
    enter(body.querySelector('[aria-selected="true"]') ?? body.rows[0]);
    const shown = Math.min(rows.length, state.shown);
    count.textContent = `${shown.toLocaleString("en-US")} of ${numbers.length.toLocaleString("en-US")} are listed.`;
    more.hidden = rows.length <= state.shown;
  };
  const show = () => {
    head.replaceChildren(...visible().map((key) => {
      const cell = element("th", "", isNumber(key) ? "number" : "");
      const arrow = key === state.key ? (state.falls ? " ↓" : " ↑") : "";
      cell.scope = "col";
      cell.setAttribute("aria-sort", arrow ? (state.falls ? "descending" : "ascending") : "none");
      const button = Object.assign(element("button", label(key) + arrow, "sort"), { type: "button" });
      button.dataset.sort = key;
      cell.append(button);
      return cell;
    }));
    sorting.value = state.key;
    turning.textContent = state.falls ? "falling ↓" : "rising ↑";
    showRows();
  };
  const sortBy = (key) => {
    state.falls = key === state.key ? !state.falls : isNumber(key) && key !== "number";
    state.key = key;
    show();
  };
  head.addEventListener("click", ({ target: { dataset: { sort } } }) => {
    if (!sort) return;
    sortBy(sort);
    head.querySelector(`[data-sort="${sort}"]`).focus();
  });
  // A narrow screen has no heads of columns to press.
  const sorting = element("select");
  sorting.append(...keys.map((key) => Object.assign(element("option", label(key)), { value: key })));
  sorting.addEventListener("change", () => sortBy(sorting.value));
  const turning = Object.assign(element("button"), { type: "button" });
  turning.addEventListener("click", () => sortBy(state.key));
  const sorter = element("label", "sort by ", "narrow");
  sorter.append(sorting, turning);
  const chooser = element("details", "", "chooser");
  chooser.append(element("summary", "Columns"), ...keys.map((key) => {
    const tick = Object.assign(element("input"), { type: "checkbox", checked: columns[key].shown });
    tick.addEventListener("change", () => {
      columns[key].shown = tick.checked;
      show();
    });
    const choice = element("label");
    choice.append(tick, label(key));
    return choice;
  }));
  form.append(sorter, chooser);
  form.addEventListener("input", ({ target: { name, value } }) => {
    if (!(name in state)) return;
    Object.assign(state, { [name]: value.trim(), shown: PAGE });
    showRows();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    state.shown += 4 * PAGE;
    showRows();
  });
  pinned.listen((number) => {
    if (number !== null && !body.querySelector(`[data-trial="${number}"]`)) showRows();
    for (const line of body.rows) line.setAttribute("aria-selected", String(Number(line.dataset.trial) === number));
  });
  box.listen(() => {
    state.shown = PAGE;
    showRows();
  });

  // A spreadsheet would run a text that begins like a formula.
  const quoted = (value) => {
    const text = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const csv = (rows) => [keys, ...rows.map((row) => keys.map((key) => valueOf(key, row)))].map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
  const values = (of, row) => Object.fromEntries(of.map((key) => [key, valueOf(key, row)]));
  const json = (rows) => `${JSON.stringify(rows.map((row) => ({ ...values(keys.filter((key) => !settings.includes(key)), row), config: values(settings, row) })), null, 1)}\n`;
  // A space that holds the trials: what they differ in is searched, the rest is fixed. YAML reads JSON's values.
  const yaml = (rows) => {
    const levels = (key) => [...new Map(rows.map((row) => [JSON.stringify(valueOf(key, row)), valueOf(key, row)])).values()].sort((a, b) => (typeof a === "number" ? a - b : 0));
    const varying = settings.filter((key) => levels(key).length > 1);
    const searched = varying.length ? varying : ["micro_batch_size"];
    const line = ([key, value]) => `${key}: ${JSON.stringify(value)}`;
    return [
      "# Trials of a study, and what lies between them: sweep run THIS-FILE.yaml",
      "name: selection", ...Object.entries(space).map(line),
      "dimensions:", ...searched.map((key) => `  ${line([key, levels(key)])}`),
      "fixed:", ...settings.filter((key) => !searched.includes(key)).map((key) => `  ${line([key, levels(key)[0]])}`),
      "baseline:", ...Object.entries(baseline).map((pair) => `  ${line(pair)}`), "",
    ].join("\n");
  };
  const FORMATS = { csv: [csv, "text/csv"], json: [json, "application/json"], yaml: [yaml, "application/yaml"] };
  downloads.addEventListener("click", ({ target: { dataset: { download } } }) => {
    if (!download || !chosen().length) return;
    const [write, type] = FORMATS[download];
    const href = URL.createObjectURL(new Blob([write(chosen())], { type: `${type};charset=utf-8` }));
    Object.assign(element("a"), { href, download: `trials.${download}` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  });

  holder.append(table);
  form.hidden = false;
  downloads.hidden = false;
  show();
})();
