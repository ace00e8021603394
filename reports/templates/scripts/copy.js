"use strict";
// Copies the text of the element that a button names: <button data-copy="ID" hidden>. Works from a file too.
(() => {
  const fallback = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return fallback(text);
    }
  };
  const prepare = (button) => {
    const label = button.textContent;
    // Without scripts there is nothing to press.
    button.hidden = false;
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      button.textContent = (await copy(source.textContent)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = label; }, 1500);
    });
    return button;
  };

  report.copyButton = (id, label) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "copy", textContent: label });
    button.dataset.copy = id;
    return prepare(button);
  };
  for (const button of document.querySelectorAll("button[data-copy]")) prepare(button);
})();
