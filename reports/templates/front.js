"use strict";
// Redraws the front by the axes and the class that the reader chooses; what is on a front was decided in Python.
(() => {
  const { columns, figures, front, rowOf, valueOf, wordsOf, box } = report;
  const form = document.getElementById("front-controls");
  if (form && Object.keys(front.views).length) {
    const whole = figures.front;
    const memory = front.x;
    const chosen = { x: front.x, y: front.y, class: front.class };
    const keys = Object.keys(columns);
    const axis = (old, key) => (key === memory ? whole.layout.xaxis : { ...old, type: "linear", range: undefined, autorange: true, tickformat: "~s", title: { text: columns[key].label.replaceAll("<", "&lt;") } });
    const redraw = () => {
      const { x, y, class: name } = chosen;
      const view = front.views[[...[x, y].sort((a, b) => keys.indexOf(a) - keys.indexOf(b)), name].join("|")] ?? [];
      const isKnown = (number) => valueOf(x, rowOf.get(number)) !== null && valueOf(y, rowOf.get(number)) !== null;
      const isOfClass = (number) => !name || wordsOf("class", rowOf.get(number)) === name;
      const data = whole.data.filter(({ meta }) => meta !== "lane" || x === memory).map((trace) => {
        if (trace.meta === "lane") return trace;
        const numbers = trace.meta === "front" ? view : trace.customdata.filter(isOfClass).filter(isKnown);
        const at = (key) => numbers.map((number) => valueOf(key, rowOf.get(number)));
        const isFront = trace.meta === "front" && { text: numbers.map(String), marker: { ...trace.marker, symbol: "circle" }, error_y: undefined };
        return { ...trace, customdata: numbers, x: at(x), y: at(y), ...isFront };
      });
      const { shapes, annotations, xaxis, yaxis, yaxis2 } = whole.layout;
      const onMemory = x === memory;
      figures.front = {
        data,
        layout: {
          ...whole.layout,
          shapes: onMemory ? shapes : [],
          annotations: onMemory ? annotations : [],
          xaxis: onMemory ? xaxis : { ...axis(xaxis, x), anchor: "y" },
          yaxis: { ...axis(yaxis, y), type: "linear", range: undefined, anchor: "x", domain: onMemory ? yaxis.domain : [0, 1] },
          ...(yaxis2 && { yaxis2: { ...yaxis2, visible: onMemory } }),
        },
      };
      report.draw("front");
    };
    form.hidden = false;
    form.addEventListener("change", ({ target: { name, value } }) => {
      // The same number on both axes says nothing: the other axis takes what this one had.
      const other = { x: "y", y: "x" }[name];
      if (other && chosen[other] === value) form.elements[other].value = chosen[other] = chosen[name];
      chosen[name] = value;
      box.set(null);
      redraw();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  report.start();
})();
