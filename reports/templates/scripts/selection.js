"use strict";
// Which trials are in the box that was drawn in a figure; null where there is none.
report.box = (() => {
  const listeners = [];
  const state = { rows: null, outlines: [] };
  const draw = (rows, outlines) => {
    Object.assign(state, { rows: rows && new Set(rows), outlines });
    for (const listener of listeners) listener();
  };
  const clear = () => state.rows && draw(null, []);
  const listen = (listener) => listeners.push(listener);
  for (const place of document.querySelectorAll(".boxed")) {
    place.querySelector("button").addEventListener("click", clear);
    listen(() => {
      place.hidden = state.rows === null;
      place.querySelector("span").textContent = `${state.rows?.size.toLocaleString("en-US")} ${state.rows?.size === 1 ? "trial is" : "trials are"} in the box that you drew, and all others are left out of the table.`;
    });
  }
  return { get rows() { return state.rows; }, get outlines() { return state.outlines; }, draw, clear, listen };
})();
// Which trial is pinned: figures, the panel and the table show it and listen here. Who pins by keyboard is
// led into the panel, and back to where that was when it is closed.
report.selection = (() => {
  const listeners = [];
  let pinned = null;
  let origin = null;
  const pin = (row, from = null) => {
    if (row === pinned) return;
    if (row === null) origin?.focus({ preventScroll: true });
    origin = row === null ? null : from;
    pinned = row;
    for (const listener of listeners) listener(pinned);
  };
  return { pin, toggle: (row, from) => pin(row === pinned ? null : row, from), get pinned() { return pinned; }, get isByKeyboard() { return origin !== null; }, listen: (listener) => listeners.push(listener) };
})();

(() => {
  const { study, words, selection, configOf } = report;
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    // What stands between backticks is code.
    made.append(...String(text ?? "").split("`").map((part, n) => (n % 2 ? Object.assign(document.createElement("code"), { textContent: part }) : part)));
    if (className) made.className = className;
    return made;
  };
  report.element = element;

  const panel = document.getElementById("pinned");
  const facts = (pairs) => {
    const list = element("dl");
    for (const [name, value] of pairs) list.append(element("dt", name), element("dd", value));
    return list;
  };
  const settings = (trial) => {
    const box = element("details");
    const text = element("pre", Object.entries(configOf(trial)).map(([key, value]) => `${key}: ${JSON.stringify(value)}`).join("\n"));
    text.id = "pinned-configuration";
    box.append(element("summary", "The whole configuration"), report.copyButton(text.id, "Copy"), text);
    return box;
  };
  const show = (row) => {
    panel.hidden = row === null;
    if (row === null) return;
    const trial = study.trials[row];
    const close = element("button", "Close", "close");
    close.type = "button";
    close.addEventListener("click", () => selection.pin(null));
    const title = element("h3", words.titleOf(trial));
    title.append(...words.badgesOf(trial).map((name) => element("span", name, "badge")));
    panel.replaceChildren(close, title, facts(words.detailsOf(trial)), settings(trial));
    if (selection.isByKeyboard) close.focus({ preventScroll: true });
  };
  selection.listen(show);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") selection.pin(null);
  });
})();
