"use strict";
// Draws every figure in the reader's colours and for the width at hand, explains the trials in it, and pins them.
(() => {
  const { study, figures, themes, resolveTrace, selection, box, words, element } = report;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const PRINT_PIXELS = 680;
  let isPrinting = false;
  // What redraws a figure by the reader's choice, by its id: (drawing, plot width) => drawing.
  report.choices = {};

  const config = (canSelect) => ({
    responsive: true,
    displaylogo: false,
    // plotly.js offers by default to upload the chart; a report never leaves the reader's machine.
    showSendToCloud: false,
    plotlyServerURL: "",
    displayModeBar: narrow.matches || isPrinting ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "autoScale2d", ...(canSelect ? [] : ["select2d"])],
  });
  const layoutFor = (layout) => {
    const template = themes[dark.matches && !isPrinting ? "dark" : "light"];
    if (isPrinting) return { ...layout, template, width: PRINT_PIXELS, autosize: false };
    if (!narrow.matches) return { ...layout, template, width: undefined, autosize: true };
    // On a small screen a finger scrolls the page, and letters give way to the drawing.
    return { ...layout, template, autosize: true, dragmode: false, font: { ...layout.font, size: 11 } };
  };

  // A ring around the pinned trial, wherever a figure shows it.
  const rings = (data) => data.flatMap((trace) => {
    const at = selection.pinned === null || trace.type === "bar" ? -1 : (rowsOf(trace) ?? []).indexOf(selection.pinned);
    if (at < 0 || trace.meta === "line") return [];
    const ink = dark.matches && !isPrinting ? "#e3e7ec" : "#1c2128";
    if (trace.path) return [{ ...trace, rows: [selection.pinned], line: { color: ink, width: 4 }, opacity: 1, showlegend: false, name: "pinned" }];
    const { x, y } = resolveTrace({ rows: [selection.pinned], x: Array.isArray(trace.x) ? [trace.x[at]] : trace.x, y: Array.isArray(trace.y) ? [trace.y[at]] : trace.y });
    return [{
      type: "scatter", mode: "markers", x, y, xaxis: trace.xaxis ?? "x", yaxis: trace.yaxis ?? "y", hoverinfo: "skip", showlegend: false,
      name: "pinned", marker: { symbol: "circle-open", size: 22, color: ink, line: { width: 2 } },
    }];
  });
  // Plotly's own figures name the rows of their marks as customdata.
  const rowsOf = (trace) => trace.rows ?? (trace.hoverinfo === "none" ? trace.customdata : undefined);
  const hasTrials = ({ data }) => data.some(rowsOf);

  const draw = (id) => {
    const holder = document.getElementById(id);
    if (!holder) return;
    const width = isPrinting ? PRINT_PIXELS : holder.clientWidth;
    const drawing = report.choices[id]?.(figures[id], width) ?? figures[id];
    Plotly.react(holder, [...drawing.data, ...rings(drawing.data)].map(resolveTrace), layoutFor(drawing.layout), config(drawing.layout.dragmode === "select"));
    // Plotly's buttons appear under a mouse alone: whom Tab led there would see nothing.
    for (const button of holder.querySelectorAll(".modebar-btn")) button.tabIndex = -1;
    holder.shown = drawing;
  };
  report.draw = draw;
  // A figure is drawn when it comes near the window, again where it went stale meanwhile; on paper all are.
  const near = new Set();
  const stale = new Set(Object.keys(figures));
  const refresh = (ids) => ids.forEach((id) => {
    stale.add(id);
    if (!near.has(id) && !isPrinting) return;
    stale.delete(id);
    draw(id);
    attend(id);
  });
  const drawAll = () => refresh(Object.keys(figures));
  const watcher = new IntersectionObserver((entries) => entries.forEach(({ target: { id }, isIntersecting }) => {
    if (!isIntersecting) near.delete(id);
    else if (near.add(id) && stale.has(id)) refresh([id]);
  }), { rootMargin: "400px" });

  const tip = document.getElementById("tip");
  const explain = (row, x, y) => {
    const trial = study.trials[row];
    tip.replaceChildren(element("strong", [words.titleOf(trial), ...words.badgesOf(trial)].join(" · ")));
    for (const [name, value] of words.factsOf(trial)) tip.append(element("div", `${name}: ${value}`));
    tip.hidden = false;
    const left = Math.min(x + 14, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${y + 14}px`;
  };
  const forget = () => { tip.hidden = true; };

  // By keyboard: arrows walk along the front, or along all trials of a figure without one; Enter pins.
  const walkable = (holder) => {
    const traces = holder.shown.data.filter((trace) => rowsOf(trace) && trace.meta !== "line");
    const front = traces.find((trace) => trace.meta === "front");
    if (front?.rows.length) return front.rows;
    return [...new Set(traces.flatMap(rowsOf))].sort((a, b) => a - b);
  };
  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const walk = (holder, event) => {
    const rows = walkable(holder);
    const at = rows.indexOf(holder.cursor);
    if (event.key === "Enter" && at >= 0) selection.toggle(holder.cursor, holder);
    else if (event.key in STEPS && rows.length) {
      const step = STEPS[event.key];
      holder.cursor = rows[at < 0 ? (step > 0 ? 0 : rows.length - 1) : (at + step + rows.length) % rows.length];
      const box = holder.getBoundingClientRect();
      explain(holder.cursor, box.left + scrollX + 60, box.top + scrollY);
    } else return;
    event.preventDefault();
  };
  const attend = (id) => {
    const holder = document.getElementById(id);
    if (!holder || !hasTrials(figures[id]) || holder.tabIndex === 0) return;
    holder.tabIndex = 0;
    holder.setAttribute("role", "application");
    holder.setAttribute("aria-label", `${holder.getAttribute("aria-label")}. Arrow keys walk through the trials, Enter pins one.`);
    holder.on("plotly_hover", ({ points: [point], event }) => {
      if (Number.isInteger(point.customdata)) explain(point.customdata, event.pageX, event.pageY);
    });
    holder.on("plotly_unhover", forget);
    holder.on("plotly_click", ({ points: [point] }) => {
      if (Number.isInteger(point.customdata)) selection.toggle(point.customdata);
    });
    holder.on("plotly_selected", (event) => {
      if (event?.range) box.draw(event.points.map(({ customdata }) => customdata).filter(Number.isInteger), holder.layout.selections);
    });
    holder.on("plotly_deselect", box.clear);
    holder.addEventListener("keydown", (event) => walk(holder, event));
    holder.addEventListener("blur", forget);
  };

  report.start = () => {
    for (const [id, { layout }] of Object.entries(figures)) {
      const holder = document.getElementById(id);
      if (!holder) continue;
      holder.style.minHeight = `${layout.height}px`;
      watcher.observe(holder);
    }
    selection.listen(() => refresh(Object.keys(figures).filter((id) => hasTrials(figures[id]))));
    dark.addEventListener("change", drawAll);
    narrow.addEventListener("change", drawAll);
    const print = (now) => () => { isPrinting = now; drawAll(); };
    addEventListener("beforeprint", print(true));
    addEventListener("afterprint", print(false));
  };
})();
