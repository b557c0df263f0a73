// Lines over rounds: accuracy, cohort entropy, bytes to an accuracy, participation.
const shownMethods = () => view.group.methods.filter((method) => method.shown);

const bandAndLine = (method, curve, unit, digits) => {
  const colour = colourOf(method);
  // Many bands on top of each other would hide every line.
  const opacity = (isDark() ? 0.24 : 0.15) / Math.max(1, shownMethods().length / 4);
  const traces = [];
  if (curve.std.some((value) => value > 0)) {
    const upper = curve.mean.map((value, i) => value + curve.std[i]);
    const lower = curve.mean.map((value, i) => value - curve.std[i]);
    traces.push({
      x: [...curve.x, ...[...curve.x].reverse()], y: [...upper, ...lower.reverse()],
      fill: "toself", fillcolor: faded(colour, opacity), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
    });
  }
  traces.push({
    x: curve.x, y: curve.mean, name: plain(clipped(method.label, 40)), mode: modeOf(method, curve.x.length),
    line: lineOf(method), marker: markOf(method),
    customdata: curve.std, meta: method.label,
    hovertemplate: method.seeds > 1 ? `%{y:.${digits}f} ± %{customdata:.${digits}f}${unit}` : `%{y:.${digits}f}${unit}`,
  });
  return traces;
};

// All bands under all lines.
const layered = (traces) => [...traces.filter((trace) => trace.fill), ...traces.filter((trace) => !trace.fill)];

const roundAxis = (methods, curve) => wholeAxis("Round", Math.max(...methods.map((method) => method[curve].x.at(-1) ?? 0)));

const drawAccuracy = () => {
  const methods = shownMethods().filter((method) => method.accuracy.x.length);
  if (!methods.length) return drawEmpty("accuracy-chart", "Nothing to show: no method is switched on, or no round was evaluated.");
  const traces = layered(methods.flatMap((method) => bandAndLine(method, method.accuracy, " %", 2)));
  return draw("accuracy-chart", traces, layout({
    hovermode: "x unified", xaxis: roundAxis(methods, "accuracy"), yaxis: axis("Test accuracy (%)", { rangemode: "tozero" }),
  }));
};

const drawEntropy = () => {
  const methods = shownMethods();
  if (!methods.length) return drawEmpty("entropy-chart", "No method is switched on.");
  const classes = view.group.classes.length;
  const traces = layered(methods.flatMap((method) => bandAndLine(method, method.entropy, " bits", 3)));
  const level = (count, text, position) => ({
    line: { x0: 0, x1: 1, xref: "paper", y0: Math.log2(count), y1: Math.log2(count), line: { color: cssColour("--soft"), width: 1.3, dash: "dash" } },
    note: { x: 0, xref: "paper", xanchor: "left", y: Math.log2(count), yanchor: position, text: `${text} = ${Math.log2(count).toFixed(3)}`, showarrow: false, font: { size: 12, color: cssColour("--soft") }, bgcolor: cssColour("--page"), opacity: 0.9, borderpad: 1 },
  });
  const levels = [level(classes, `log₂(${classes})`, "bottom")];
  if (classes > 2) levels.push(level(classes - 1, `log₂(${classes - 1})`, "top"));
  const lows = methods.flatMap((method) => method.entropy.mean.map((value, i) => value - method.entropy.std[i]));
  const top = Math.log2(classes);
  const bottom = Math.min(...lows, classes > 2 ? Math.log2(classes - 1) : 0);
  const span = Math.max(top - bottom, 0.05);
  return draw("entropy-chart", traces, layout({
    hovermode: "x unified", xaxis: roundAxis(methods, "entropy"),
    yaxis: axis("Entropy (bits)", { range: [Math.max(0, bottom - 0.1 * span), top + 0.15 * span] }),
    shapes: levels.map((item) => item.line), annotations: levels.map((item) => item.note),
  }));
};

const drawParticipation = () => {
  const byClient = document.getElementById("participation-order").value === "client";
  const methods = shownMethods();
  if (!methods.length) return drawEmpty("participation-chart", "No method is switched on.");
  const names = view.group.clients;
  const traces = methods.map((method) => {
    const run = runOf(method);
    const order = run.times.map((_, client) => client);
    if (!byClient) order.sort((a, b) => run.times[b] - run.times[a] || a - b);
    return {
      x: order.map((_, rank) => rank + (byClient ? 0 : 1)), y: order.map((client) => run.times[client]),
      customdata: order.map((client) => plain(clipped(names[client], 30))),
      name: `${shownName(method, isNarrow() ? 22 : 40)}: H_norm ${method.hNorm === null ? "–" : method.hNorm.toFixed(3)}`, meta: method.label,
      mode: byClient ? "markers" : modeOf(method, order.length), line: lineOf(method, { shape: "hvh" }),
      marker: byClient ? { ...markOf(method), size: 6, maxdisplayed: 0, opacity: 0.8 } : markOf(method),
      hovertemplate: "client %{customdata}: chosen %{y} times<extra>%{fullData.name}</extra>",
    };
  });
  const ticks = clientTicks(names);
  // The legend stands below the plot, with room of its own however many methods there are.
  const place = document.getElementById("participation-chart");
  const legendHeight = 22 * Math.ceil(methods.length / Math.max(1, Math.floor(place.clientWidth / 330))) + 10;
  place.style.height = `${320 + legendHeight}px`;
  return draw("participation-chart", traces, layout({
    showlegend: true, legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, maxheight: 1, itemclick: false, itemdoubleclick: false },
    hovermode: "closest", margin: { l: 54, r: 12, t: 14, b: 60 + legendHeight },
    xaxis: byClient ? axis("Client", ticks) : wholeAxis("Clients, most chosen first", names.length),
    yaxis: wholeAxis("Times chosen", Math.max(...traces.flatMap((trace) => trace.y)), { rangemode: "tozero" }),
  }));
};

// At most a dozen names on an axis of clients, never read as numbers or HTML.
const clientTicks = (names) => {
  const step = Math.max(1, Math.ceil(names.length / 12));
  const tickvals = names.map((_, client) => client).filter((client) => client % step === 0);
  return { tickvals, ticktext: tickvals.map((client) => plain(clipped(names[client], 12))) };
};

const megabytes = (bytes) => (bytes / 1e6 >= 100 ? Math.round(bytes / 1e6).toLocaleString("en") : (bytes / 1e6).toPrecision(3));

const drawBytes = () => {
  const targets = view.group.targets;
  // A mean over the seeds that got there would flatter a method that mostly does not: lines end where one seed fails.
  const byAll = (method, cost) => cost && cost[2] === method.seeds;
  const methods = shownMethods().filter((method) => method.costs.some((cost) => byAll(method, cost)));
  drawTargetTable();
  if (!methods.length) return drawEmpty("bytes-chart", "No method that is switched on reached more than guessing does with every seed.");
  const traces = methods.map((method) => {
    const reached = targets.map((_, i) => i).filter((i) => byAll(method, method.costs[i]));
    return {
      x: reached.map((i) => targets[i]), y: reached.map((i) => method.costs[i][1] / 1e6), name: plain(clipped(method.label, 40)), meta: method.label,
      mode: modeOf(method, reached.length), line: lineOf(method, { shape: "hv" }), marker: markOf(method),
      customdata: reached.map((i) => method.costs[i][0]),
      hovertemplate: "%{y:,.1f} MB, %{customdata} rounds",
    };
  });
  const at = Number(document.getElementById("target").value);
  return draw("bytes-chart", traces, layout({
    hovermode: "x unified", xaxis: axis("Test accuracy to reach (%)"), yaxis: axis("Sent (MB)", { rangemode: "tozero" }),
    shapes: [{ x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: cssColour("--accent"), width: 1.5, dash: "dot" } }],
  }));
};

const drawTargetTable = () => {
  const place = document.getElementById("target-table");
  const target = Number(document.getElementById("target").value);
  const index = view.group.targets.indexOf(target);
  document.getElementById("target-number").textContent = `${target} %`;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [name, kind] of [["Method", "text"], ["Sent (MB)", "number"], ["Rounds", "number"], ["Seeds that reached it", "number"]]) {
    const title = document.createElement("th");
    title.scope = "col";
    title.className = kind;
    title.textContent = name;
    head.append(title);
  }
  const body = table.createTBody();
  const missed = ({ method, cost }) => method.seeds - (cost ? cost[2] : 0);
  shownMethods()
    .map((method) => ({ method, cost: index < 0 ? null : method.costs[index] }))
    .sort((a, b) => missed(a) - missed(b) || (a.cost ? a.cost[1] : 0) - (b.cost ? b.cost[1] : 0))
    .forEach(({ method, cost }) => {
      const row = body.insertRow();
      row.append(
        cell("th", method.label, method.label),
        cell("td", cost ? megabytes(cost[1]) : "not reached", cost ? cost[1] : "", "number"),
        cell("td", cost ? String(cost[0]) : "–", cost ? cost[0] : "", "number"),
        cell("td", `${cost ? cost[2] : 0} of ${method.seeds}`, cost ? cost[2] : 0, "number"),
      );
    });
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.append(table);
  place.replaceChildren(scroll);
};
