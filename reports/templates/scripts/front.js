"use strict";
// Redraws the front by the axes and the class that the reader chooses; what is on a front was decided in Python.
(() => {
  const ID = "front-figure";
  if (!report.figures[ID]) return;
  const { study, figures, words } = report;
  const { controls } = figures[ID];
  const form = document.getElementById("front-controls");
  const chosen = { x: controls.x, y: controls.y, class: "" };
  const isMoreBetter = (column) => study.columns[column]?.more_is_better ?? false;
  // What plotly reads as markup, as it stands.
  const markup = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const nothing = { rows: [], labels: [], shared: "" };

  const viewOf = ({ x, y, class: name }) => {
    const [a, b] = Object.keys(study.columns).filter((column) => column === x || column === y);
    return controls.views[`${a}|${b}|${name}`] ?? nothing;
  };
  const isOfClass = (row) => chosen.class === "" || study.trials[row].class === chosen.class;

  const rangeOf = (column) => {
    const values = study.trials.map((trial) => trial[column]).filter(words.isKnown);
    const least = Math.min(...values);
    const most = Math.max(...values);
    const air = 0.08 * (most - least) || 0.1 * Math.abs(most) || 1;
    return [least < 0.4 * most ? 0 : Math.max(least - air, 0), most + air];
  };
  const TICKS = { rate: ",~r", usd: "$~r", count: "~s", memory: "~r", number: "~r" };
  const axisOf = (column) => {
    const known = study.columns[column];
    // Where nothing was measured the panel has nothing to say.
    if (!known) return { visible: false, range: [0, 1] };
    return { title: { text: markup(shortened(known.label)), standoff: 10 }, range: rangeOf(column), tickformat: TICKS[known.unit] };
  };

  // Labels stand on the side where nothing can be better; one that would hide another, or leave the plot, is left out.
  const LETTER = 6.4;
  const HEIGHT = 16;
  const TITLE_LETTERS = 48;
  const shortened = (text) => (text.length > TITLE_LETTERS ? `${text.slice(0, TITLE_LETTERS - 1)}…` : text);
  const AIR = { mark: 5, named: 12 };
  const namedRows = () => ["winner", "baseline"].flatMap((name) => study.named[name]).map((number) => report.rowOf.get(number));
  const labelled = (view, layout, width) => {
    const [left, right] = layout.xaxis.range;
    const [bottom, top] = layout.yaxis.range;
    const tall = (layout.height - layout.margin.t - layout.margin.b) * (1 - (layout.yaxis.domain?.[0] ?? 0));
    const wide = width - 90;
    const taken = [];
    const place = (trial) => [((trial[chosen.x] - left) / (right - left)) * wide, ((top - trial[chosen.y]) / (top - bottom)) * tall];
    const named = new Set(namedRows());
    const marks = [...named, ...Object.values(controls.measured).flat().filter(isOfClass)].map((row) => [...place(study.trials[row]), named.has(row) ? AIR.named : AIR.mark]);
    const isFree = (box) => !marks.some(([x, y, air]) => box[0] < x + air && x - air < box[1] && box[2] < y + air && y - air < box[3] - 2)
      && box[0] >= 0 && box[1] <= wide && box[2] >= -4 && box[3] <= tall
      && !taken.some((other) => box[0] < other[1] && other[0] < box[1] && box[2] < other[3] && other[2] < box[3]);
    const toLeft = !isMoreBetter(chosen.x);
    const above = isMoreBetter(chosen.y);
    const order = [...new Set([0, view.rows.length - 1, ...view.rows.keys()])].filter((n) => n in view.rows);
    const annotations = [];
    for (const n of order) {
      const trial = study.trials[view.rows[n]];
      const [px, py] = place(trial);
      const gap = named.has(view.rows[n]) ? AIR.named + 2 : AIR.mark + 2;
      const long = view.labels[n].length * LETTER;
      for (const isLeft of [toLeft, !toLeft]) {
        const x0 = isLeft ? px - gap - long : px + gap;
        const y0 = above === (isLeft === toLeft) ? py - HEIGHT - 4 : py + 4;
        const box = [x0, x0 + long, y0, y0 + HEIGHT];
        if (!isFree(box)) continue;
        taken.push(box);
        annotations.push({
          x: trial[chosen.x], y: trial[chosen.y], text: markup(view.labels[n]), showarrow: false,
          xanchor: isLeft ? "right" : "left", yanchor: y0 < py ? "bottom" : "top", xshift: isLeft ? -gap : gap, yshift: y0 < py ? 2 : -2, font: { size: 12 },
        });
        break;
      }
    }
    return annotations;
  };

  const layoutOf = (layout, view, width) => {
    const onMemory = chosen.x === controls.memory;
    const lanes = controls.lanes.map(({ verdict, label }) => {
      const count = study.trials.filter((t, row) => t.verdict === verdict && !words.isKnown(t.tokens_per_second) && isOfClass(row)).length;
      return `${label}: ${count.toLocaleString("en-US")}`;
    });
    const shown = {
      ...layout,
      xaxis: { ...layout.xaxis, ...(onMemory ? controls.memory_axis : { ...axisOf(chosen.x), tickmode: "auto", anchor: "y" }) },
      yaxis: { ...layout.yaxis, ...axisOf(chosen.y) },
      shapes: onMemory ? controls.shapes : [],
      dragmode: "select",
      selections: report.box.outlines,
    };
    if (layout.yaxis2 && onMemory) shown.yaxis2 = { ...layout.yaxis2, ticktext: lanes };
    // Who was not measured has a place by memory alone.
    if (layout.yaxis2 && !onMemory) Object.assign(shown, { yaxis: { ...shown.yaxis, domain: [0, 1] }, yaxis2: { ...layout.yaxis2, visible: false, domain: [0, 0.001] } });
    shown.annotations = [...(onMemory ? controls.annotations : []), ...labelled(view, shown, width)];
    return shown;
  };
  // Whiskers are the intervals of measured speeds; a prediction's are wide, and alike for all.
  const whiskers = (rows, axis) => {
    if (chosen[axis] !== "tokens_per_second") return { visible: false };
    const ends = rows.map((row) => study.trials[row]).map(({ tokens_per_second: at, tokens_per_second_low: low, tokens_per_second_high: high }) => [(high ?? at) - at, at - (low ?? at)]);
    return { type: "data", symmetric: false, array: ends.map(([up]) => up), arrayminus: ends.map(([, down]) => down), thickness: 1.5, width: 4, visible: true };
  };
  const MEASURED = ["others", "line", "front", "named"];
  const tracesOf = (data, view) => {
    const onFront = new Set(view.rows);
    const byX = [...view.rows].sort((a, b) => study.trials[a][chosen.x] - study.trials[b][chosen.x]);
    const shape = isMoreBetter(chosen.x) ? "vh" : "hv";
    return data.filter(({ meta }) => meta !== "lane" || chosen.x === controls.memory).map((trace) => {
      const place = MEASURED.includes(trace.meta) ? { x: `@${chosen.x}`, y: `@${chosen.y}` } : {};
      if (trace.meta === "others") return { ...trace, ...place, rows: controls.measured[trace.name].filter((row) => isOfClass(row) && !onFront.has(row)) };
      if (trace.meta === "line") return { ...trace, ...place, rows: byX, line: { ...trace.line, shape } };
      if (trace.meta === "front") return { ...trace, ...place, error_x: whiskers(view.rows, "x"), error_y: whiskers(view.rows, "y"), rows: view.rows, marker: { ...trace.marker, symbol: view.rows.map((row) => controls.symbols[study.trials[row].verdict]) } };
      const kept = trace.rows.map((row, n) => [row, n]).filter(([row]) => isOfClass(row));
      const only = (part) => (Array.isArray(part) ? kept.map(([, n]) => part[n]) : part);
      return { ...trace, rows: kept.map(([row]) => row), x: only(trace.x), y: only(trace.y), text: only(trace.text), marker: { ...trace.marker, symbol: only(trace.marker.symbol) }, ...place };
    });
  };

  report.choices[ID] = (drawing, width) => {
    const view = viewOf(chosen);
    document.getElementById("front-shared").textContent = view.shared ? `All on the front: ${view.shared}.` : "";
    return { data: tracesOf(drawing.data, view), layout: layoutOf(drawing.layout, view, width) };
  };
  if (form.querySelector("select")) form.hidden = false;
  report.box.listen(() => report.box.rows ?? report.draw(ID));
  form.addEventListener("change", ({ target }) => {
    const before = chosen[target.name];
    chosen[target.name] = target.value;
    report.box.clear();
    // The same number on both axes says nothing: the other axis takes what this one had.
    const other = target.name === "x" ? "y" : "x";
    if (target.name !== "class" && chosen.x === chosen.y) {
      chosen[other] = before;
      form.elements[other].value = before;
    }
    report.draw(ID);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
})();
