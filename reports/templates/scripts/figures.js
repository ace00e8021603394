"use strict";
// Draws every figure of the page, in the reader's colours and for the width at hand.
(() => {
  const { figures, themes, resolveTrace } = report;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const configNow = () => ({
    responsive: true,
    displaylogo: false,
    // plotly.js offers by default to upload the chart; a report never leaves the reader's machine.
    showSendToCloud: false,
    plotlyServerURL: "",
    displayModeBar: narrow.matches ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  });

  const layoutFor = (layout) => {
    const template = themes[dark.matches ? "dark" : "light"];
    if (!narrow.matches) return { ...layout, template };
    // On a small screen a finger scrolls the page, and letters give way to the drawing.
    return { ...layout, template, dragmode: false, font: { ...layout.font, size: 11 } };
  };
  const draw = () => {
    for (const [id, { data, layout }] of Object.entries(figures)) {
      Plotly.react(id, data.map(resolveTrace), layoutFor(layout), configNow());
    }
  };

  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  draw();
})();
