"use strict";
// Reads the page's data; copies; keeps which trial is pinned and which are in a box, for figures, table and panel.
const report = (() => {
  const { columns, figures, themes, settings, space, baseline, front } = JSON.parse(document.getElementById("page-data").textContent);
  const numbers = columns.number ? columns.number.at.map((at) => columns.number.pairs[at][0]) : [];
  const rowOf = new Map(numbers.map((number, row) => [number, row]));
  const pairOf = (key, row) => columns[key].pairs[columns[key].at[row]];
  const valueOf = (key, row) => pairOf(key, row)[0];
  const wordsOf = (key, row) => pairOf(key, row)[1];
  const element = (tag, text, className) => Object.assign(document.createElement(tag), { textContent: text ?? "", className: className ?? "" });

  // What is chosen, and who wants to know: a trial's number, or a set of numbers; null is nothing.
  const chosen = () => {
    const listeners = [];
    return {
      value: null,
      set(value) {
        if (value === this.value) return;
        this.value = value;
        for (const listener of listeners) listener(value);
      },
      listen(listener) { listeners.push(listener); },
    };
  };
  const pinned = chosen();
  const box = chosen();
  let origin = null;
  // Who pins by keyboard is led into the panel, and back to where that was when it is closed.
  const pin = (number, from = null) => {
    origin = from;
    pinned.set(number === pinned.value ? null : number);
  };

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // A page that was opened as a file may have no clipboard.
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  document.addEventListener("click", async ({ target }) => {
    const id = target.dataset?.copy;
    if (!id) return;
    const label = target.textContent;
    target.textContent = (await copy(document.getElementById(id).textContent)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { target.textContent = label; }, 1500);
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;

  const panel = document.getElementById("pinned");
  pinned.listen((number) => {
    panel.hidden = number === null;
    if (number === null) {
      origin?.focus({ preventScroll: true });
      origin = null;
      return;
    }
    const row = rowOf.get(number);
    const close = Object.assign(element("button", "Close", "close"), { type: "button" });
    close.addEventListener("click", () => pin(number, origin));
    const facts = element("dl");
    for (const key of Object.keys(columns).filter((key) => !settings.includes(key) && wordsOf(key, row))) facts.append(element("dt", columns[key].label), element("dd", wordsOf(key, row)));
    const whole = element("details");
    const text = element("pre", settings.map((key) => `${key}: ${JSON.stringify(valueOf(key, row))}`).join("\n"));
    text.id = "pinned-configuration";
    const button = Object.assign(element("button", "Copy", "copy"), { type: "button" });
    button.dataset.copy = text.id;
    whole.append(element("summary", "The whole configuration"), button, text);
    panel.replaceChildren(close, element("h3", `Trial ${number}`), facts, whole);
    if (origin) close.focus({ preventScroll: true });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && pinned.value !== null) pin(pinned.value, origin);
  });
  for (const place of document.querySelectorAll(".boxed")) {
    place.querySelector("button").addEventListener("click", () => box.set(null));
    box.listen((numbers) => { place.hidden = numbers === null; });
  }

  // Elements with a trial pin it by click or Enter; Tab reaches a table once, and the arrows go on from there.
  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const attend = (table) => {
    const all = () => [...table.querySelectorAll("[data-trial]")];
    const enter = (one) => all().forEach((other) => { other.tabIndex = other === one ? 0 : -1; });
    const pickable = (target) => (target.closest("details, a, button")?.closest("[data-trial]") ? null : target.closest("[data-trial]"));
    enter(all()[0]);
    table.addEventListener("click", ({ target }) => {
      const one = pickable(target);
      if (one) enter(one), pin(Number(one.dataset.trial));
    });
    table.addEventListener("keydown", (event) => {
      const at = all().indexOf(event.target);
      const next = all()[at + STEPS[event.key]];
      if (at < 0 || !(next || event.key === "Enter")) return;
      event.preventDefault();
      if (!next) return pin(Number(event.target.dataset.trial), event.target);
      enter(next);
      next.focus();
    });
    return { enter, all };
  };
  for (const table of document.querySelectorAll(".wall")) {
    const { all } = attend(table);
    pinned.listen((number) => all().forEach((cell) => cell.classList.toggle("pinned", Number(cell.dataset.trial) === number)));
  }
  // On paper everything is unfolded.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((fold) => { fold.removeAttribute("name"); fold.open = true; }));

  return { columns, figures, themes, settings, space, baseline, front, numbers, rowOf, valueOf, wordsOf, element, pinned, box, attend };
})();
