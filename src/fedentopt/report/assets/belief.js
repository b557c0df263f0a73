// What the server believed beside what was true, round by round; for settings that have such figures.
const believing = () => shownMethods().filter((method) => method.belief);
const hasBeliefs = () => view.group.methods.some((method) => method.belief);

// Panels of one chart, one per method, on the same scales: axes, and titles above the panels, by method.
const PANEL = { least: 300, title: 24, below: 30, gap: 34 };
const panels = (id, methods, { height, notes = () => [], foot = 0, x, y }) => {
  const place = document.getElementById(id);
  const room = place.clientWidth;
  const margin = { l: 58, r: 12, t: 6, b: 46 + foot };
  const wide = Math.max(120, room - margin.l - margin.r);
  const columns = Math.max(1, Math.min(methods.length === 4 ? 2 : 3, methods.length, Math.floor(wide / PANEL.least)));
  const rows = Math.ceil(methods.length / columns);
  const width = (wide - (columns - 1) * PANEL.gap) / columns;
  // Notes stand in one line where they fit.
  const below = methods.map(notes).map((parts) => (parts.join(" · ").length * 6.2 < width ? [parts.join(" · ")] : parts));
  const head = PANEL.title + 17 * Math.max(...below.map((lines) => lines.filter(Boolean).length));
  const inner = rows * (height + head) + (rows - 1) * PANEL.below;
  place.style.height = `${inner + margin.t + margin.b}px`;
  const axes = {};
  const titles = [];
  methods.forEach((method, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns];
    const left = (column * (width + PANEL.gap)) / wide;
    const top = 1 - (row * (height + head + PANEL.below) + head) / inner;
    const number = i ? String(i + 1) : "";
    const lowest = i + columns >= methods.length;
    axes[`xaxis${number}`] = { ...x, automargin: false, domain: [left, left + width / wide], anchor: `y${number}`, ...(lowest ? {} : { title: { text: "" } }) };
    axes[`yaxis${number}`] = { ...y, automargin: false, domain: [top - height / inner, top], anchor: `x${number}`, ...(column ? { title: { text: "" } } : {}) };
    titles.push({
      x: left, xref: "paper", xanchor: "left", y: top, yref: "paper", yanchor: "bottom", showarrow: false, align: "left", yshift: 4,
      text: `<b>${plain(clipped(method.label, Math.max(12, Math.floor(width / 9))))}</b>${below[i].filter(Boolean).map((line) => `<br><span style="font-size:12px">${line}</span>`).join("")}`,
      font: { size: 14, color: cssColour("--text") },
    });
  });
  return { axes, titles, margin, on: (i) => ({ xaxis: `x${i ? i + 1 : ""}`, yaxis: `y${i ? i + 1 : ""}` }) };
};
const legendBelow = { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, itemclick: false, itemdoubleclick: false };
// An entry of the legend that belongs to no single panel.
const legendEntry = (name, look) => ({ x: [null], y: [null], name, meta: name, showlegend: true, hoverinfo: "skip", ...look });

const drawBelief = () => {
  if (!hasBeliefs()) return;
  const methods = believing();
  drawBelieved(methods);
  const auc = fillAuc();
  const shares = [...new Set(methods.map((method) => method.belief.liarsAmongAll).filter((share) => share !== null))].sort((a, b) => a - b);
  const lying = (share) => methods.filter((method) => method.belief.liarsAmongAll === share);
  drawOverRounds("liars-chart", "Liars among the chosen", "Share of all picks so far (%)", (method) => method.belief.liars, " %", 1, {
    yaxis: { rangemode: "tozero" },
    // Where methods have liars in different numbers, a line of its own colour belongs to one of them.
    marks: shares.map((share) => [share, shares.length > 1 && lying(share).length === 1 ? colourOf(lying(share)[0]) : cssColour("--soft")]),
    meaning: `their share of all clients, ${shares.join(", ").replace(/, (?=[^,]*$)/, " and ")} %`,
  });
  const lows = methods.flatMap((method) => (method.belief.figures[auc]?.mean ?? []).map((value) => value - 0.05));
  drawOverRounds("auc-chart", "Liars told from others", "AUC of the suspicion", (method) => method.belief.figures[auc], "", 3, {
    yaxis: { range: [Math.min(0.4, ...lows), 1.03] }, marks: [[0.5, cssColour("--soft")]], meaning: "guessing",
  });
  drawOverRounds("error-chart", "Error of the estimates", "Total variation", (method) => method.belief.figures.estimate_error, "", 3, { yaxis: { rangemode: "tozero" } });
};

const drawBelieved = (methods) => {
  const id = "belief-chart";
  if (!methods.length) return drawEmpty(id, "No method that is switched on has a server that doubts reports.");
  const most = Math.log2(view.group.classes.length);
  const lows = methods.flatMap((method) => [method.entropy, method.belief.figures.believed_entropy].flatMap((line) => line.mean.map((value, i) => value - line.std[i])));
  const bottom = Math.min(...lows);
  const span = Math.max(most - bottom, 0.05);
  const { axes, titles, margin, on } = panels(id, methods, {
    height: isNarrow() ? 170 : methods.length > 3 ? 190 : 240, foot: 30,
    x: roundAxis(methods, "entropy"), y: axis("Entropy (bits)", { range: [Math.max(0, bottom - 0.06 * span), most + 0.06 * span] }),
  });
  const believed = { color: cssColour("--text"), width: 2, dash: "2px,3px" };
  const traces = methods.flatMap((method, i) => {
    const [truth, belief] = [method.entropy, method.belief.figures.believed_entropy].map((line) => bandAndLine(method, line, " bits", 3));
    return [
      ...truth.map((trace) => (trace.fill ? trace : { ...trace, name: "true", line: lineOf(method, { dash: "solid" }), mode: trace.x.length < 2 ? "markers" : "lines" })),
      ...belief.map((trace) => (trace.fill
        ? { ...trace, fillcolor: faded(isDark() ? "#ffffff" : "#000000", 0.1) }
        : { ...trace, name: "believed", line: believed, marker: { color: believed.color, symbol: "circle-open" }, mode: trace.x.length < 2 ? "markers" : "lines" })),
    ].map((trace) => ({ ...trace, ...on(i), showlegend: false, meta: undefined }));
  });
  const legend = [legendEntry("true", { mode: "lines", line: { color: cssColour("--soft"), width: 2.2 } }), legendEntry("believed by the server", { mode: "lines", line: believed })];
  return draw(id, [...layered(traces), ...legend], layout({ hovermode: "x unified", ...axes, margin, annotations: titles, showlegend: true, legend: legendBelow }));
};

// Lines of the methods that have a figure; without any, the chart takes no room.
const drawOverRounds = (id, title, unitTitle, curveOf, unit, digits, { yaxis = {}, marks = [], meaning = "" } = {}) => {
  const figure = document.getElementById(id).closest("figure");
  figure.hidden = !view.group.methods.some((method) => method.belief && curveOf(method)?.x.length);
  if (figure.hidden) return;
  const methods = believing().filter((method) => curveOf(method)?.x.length);
  if (!methods.length) return drawEmpty(id, "No method that is switched on has this figure.");
  const last = Math.max(...methods.map((method) => curveOf(method).x.at(-1)));
  return draw(id, layered(methods.flatMap((method) => bandAndLine(method, curveOf(method), unit, digits))), layout({
    title: { text: title + (marks.length ? `<br><span style="font-size:12px;color:${cssColour("--soft")}">dashed: ${meaning}</span>` : ""), font: { size: 15 }, x: 0.02, xanchor: "left" },
    hovermode: "x unified", margin: { l: 54, r: 12, t: 54, b: 46 },
    xaxis: wholeAxis("Round", last), yaxis: axis(unitTitle, yaxis),
    shapes: marks.map(([at, color]) => ({ x0: 0, x1: 1, xref: "paper", y0: at, y1: at, line: { color, width: 1.3, dash: "dash" } })),
  }));
};

// Which AUC is drawn, where runs keep several.
const AUCS = { suspicion_auc: "of all observations so far", first_auc: "after one observation per client", third_auc: "after three observations per client" };
const fillAuc = () => {
  const names = Object.keys(AUCS).filter((name) => view.group.methods.some((method) => method.belief?.figures[name]));
  const select = byId("auc-of");
  const chosen = names.includes(select.value) ? select.value : names[0];
  fillSelect(select, names.map((name) => [name, AUCS[name]]), chosen);
  byId("auc-control").hidden = names.length < 2;
  return chosen;
};
