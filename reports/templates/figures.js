"use strict";
// Draws each figure when it comes near the window, in the reader's colours; a click pins the trial of a mark.
(() => {
  const { figures, themes, pinned, box } = report;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const drawn = new Set();
  let isPrinting = false;

  const config = () => ({
    responsive: true,
    displaylogo: false,
    // plotly.js offers by default to upload the chart; a report never leaves the reader's machine.
    showSendToCloud: false,
    plotlyServerURL: "",
    displayModeBar: narrow.matches || isPrinting ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "autoScale2d"],
  });
  // A ring around the pinned trial, wherever a figure shows it.
  const rings = (data) => data.flatMap(({ type, mode, customdata, x, y, xaxis, yaxis }) => {
    const at = pinned.value === null || type === "bar" || mode === "lines" ? -1 : (customdata ?? []).indexOf(pinned.value);
    if (at < 0) return [];
    const marker = { symbol: "circle-open", size: 22, color: dark.matches && !isPrinting ? "#e3e7ec" : "#1c2128", line: { width: 2 } };
    return [{ type: "scatter", mode: "markers", x: [x[at]], y: [y[at]], xaxis, yaxis, marker, hoverinfo: "skip", showlegend: false }];
  });
  const draw = (id) => {
    const holder = document.getElementById(id);
    if (!holder) return;
    const { data, layout } = figures[id];
    const template = themes[dark.matches && !isPrinting ? "dark" : "light"];
    const size = isPrinting ? { width: 680 } : narrow.matches ? { dragmode: false } : {};
    Plotly.react(holder, [...data, ...rings(data)], { ...layout, template, ...size }, config());
    // Plotly's buttons appear under a mouse alone: whom Tab led there would see nothing.
    for (const button of holder.querySelectorAll(".modebar-btn")) button.tabIndex = -1;
    if (drawn.has(id)) return;
    drawn.add(id);
    holder.on("plotly_click", ({ points: [{ customdata }] }) => Number.isInteger(customdata) && pinned.set(customdata === pinned.value ? null : customdata));
    if (layout.dragmode !== "select") return;
    holder.on("plotly_selected", (event) => event?.range && box.set(new Set(event.points.map(({ customdata }) => customdata))));
    holder.on("plotly_deselect", () => box.set(null));
    box.listen((numbers) => numbers ?? Plotly.relayout(holder, { selections: [] }));
  };
  report.draw = draw;
  const watcher = new IntersectionObserver((entries) => {
    for (const { target: { id }, isIntersecting } of entries) if (isIntersecting && !drawn.has(id)) draw(id);
  }, { rootMargin: "400px" });
  report.start = () => Object.keys(figures).forEach((id) => {
    const holder = document.getElementById(id);
    if (!holder) return;
    holder.style.minHeight = `${figures[id].layout.height}px`;
    watcher.observe(holder);
  });
  const again = (ids) => ids.forEach(draw);
  pinned.listen(() => again([...drawn]));
  dark.addEventListener("change", () => again([...drawn]));
  narrow.addEventListener("change", () => again([...drawn]));
  const print = (now) => () => { isPrinting = now; again(Object.keys(figures)); };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
})();
