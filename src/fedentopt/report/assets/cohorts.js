// One round seen closely: the labels of two cohorts, all clients, and who was chosen when.
const SIDES = ["left", "right"];
const methodOn = (side) => view.group.methods[view[side]];
const runOf = (method) => method.runs.find((run) => run.seed === view.seed) ?? method.runs[0];
// A method that has no run of the chosen seed shows another one, and says so.
const shownName = (method, most = 40) => {
  const { seed } = runOf(method);
  return plain(clipped(method.label, most)) + (seed === view.seed ? "" : `, seed ${seed}`);
};

// The slider steps over the rounds kept for both methods.
const keptRounds = () => {
  const [left, right] = SIDES.map((side) => runOf(methodOn(side)).rounds);
  const inRight = new Set(right);
  return left.filter((round) => inRight.has(round));
};
const currentRound = () => view.rounds[Number(document.getElementById("round").value)];

const cohortAt = (side) => {
  const method = methodOn(side);
  const run = runOf(method);
  const at = run.rounds.indexOf(currentRound());
  const absent = run.absent[String(currentRound())] ?? [];
  return { method, run, at, clients: run.picks[at] ?? [], absent, labels: view.group.labelTables[run.table] };
};

const NO_LABELS = "The label counts are not in the page: too many for one, or not in the folder of this run.";

const drawCohort = (side) => {
  const { method, run, at, clients, absent, labels } = cohortAt(side);
  const id = `cohort-${side}`;
  const caption = document.getElementById(`${id}-text`);
  caption.replaceChildren();
  if (at < 0) return drawEmpty(id, "The picks of this run are not in the page.");
  if (!labels) {
    describeCohort(caption, { run, at, clients, absent, missing: null });
    return drawEmpty(id, NO_LABELS);
  }
  const names = view.group.classes;
  const everyone = names.map((_, c) => labels.reduce((sum, row) => sum + row[c], 0));
  const totals = names.map((_, c) => clients.reduce((sum, client) => sum + labels[client][c], 0));
  const colour = colourOf(method);
  const classes = names.map((_, c) => c);
  const traces = clients.map((client, order) => ({
    type: "bar", x: classes, y: classes.map((c) => labels[client][c]),
    marker: { color: faded(colour, absent.includes(client) ? 0.25 : order % 2 ? 0.62 : 0.85), line: { color: cssColour("--page"), width: clients.length > 30 || names.length > 30 ? 0 : 1 } },
    name: plain(`client ${clipped(view.group.clients[client], 30)}`),
    customdata: classes.map((c) => plain(clipped(names[c], 30))),
    hovertemplate: `client ${plain(clipped(view.group.clients[client], 30)).replace(/%\{/g, "% {")}${absent.includes(client) ? " (did not train)" : ""}<br>%{y} × %{customdata}<extra></extra>`,
  }));
  // Where this cohort would stand if it were a fair sample of everybody.
  const total = totals.reduce((a, b) => a + b, 0);
  const all = everyone.reduce((a, b) => a + b, 0) || 1;
  traces.push({
    type: "scatter", mode: "markers", x: classes, y: everyone.map((count) => (count / all) * total), name: "all clients, scaled", meta: "all clients, scaled",
    marker: { symbol: "line-ew-open", size: 20, color: "#E69F00", line: { width: 3, color: "#E69F00" } },
    hovertemplate: "all clients, scaled: %{y:.0f}<extra></extra>",
  });
  const missing = classes.filter((c) => totals[c] <= 0);
  const heights = document.getElementById("same-scale").checked ? SIDES.map((other) => highest(cohortAt(other))) : [highest({ clients, labels })];
  const top = Math.max(...heights, 1e-9) * 1.12;
  const most = isNarrow() ? 8 : 12;
  const slanted = names.length > 6 && names.some((name) => name.length > 4);
  draw(id, traces, layout({
    barmode: "stack", title: { text: shownName(method), font: { size: 15 }, x: 0.02, xanchor: "left" },
    xaxis: classAxis(document.getElementById(id).clientWidth - 70, most, { range: [-0.6, names.length - 0.4], tickangle: slanted ? -40 : 0 }),
    yaxis: axis("Samples", { range: [0, top] }), hovermode: "closest",
    annotations: missing.map((c) => ({ x: c, y: 0, yanchor: "bottom", text: "✕", showarrow: false, font: { size: 18, color: cssColour("--warn") } })),
  }));
  // Noisy counts do not say who is missing; rounds.csv says how many are.
  describeCohort(caption, { run, at, clients, absent, missing: run.noisy ? null : missing });
};

const highest = ({ clients, labels }) => (labels ? Math.max(0, ...view.group.classes.map((_, c) => clients.reduce((sum, client) => sum + labels[client][c], 0))) : 0);

const describeCohort = (place, { run, at, clients, absent, missing }) => {
  const { classes, clients: names } = view.group;
  const strong = (text, kind) => {
    const element = document.createElement("strong");
    element.textContent = text;
    if (kind) element.dataset.figure = kind;
    return element;
  };
  const lost = document.createElement("span");
  const gaps = missing ? missing.length : classes.length - run.covered[at];
  lost.className = gaps ? "missing" : "";
  lost.textContent = !gaps ? "none missing" : missing ? `missing: ${missing.map((c) => classes[c]).join(", ")}` : `${gaps} missing`;
  place.append(
    "Entropy ", strong(run.entropy[at] === null ? "–" : run.entropy[at].toFixed(4), "entropy"), ` of at most ${Math.log2(classes.length).toFixed(4)} bits · `,
    strong(String(run.covered[at]), "covered"), ` of ${classes.length} classes, `, lost,
  );
  if (run.accuracy[at] !== null) place.append(" · accuracy after the round ", strong(run.accuracy[at].toFixed(2), "accuracy"), " %");
  place.append(document.createElement("br"), "Clients ", strong(clients.map((client) => names[client]).join(", ") || "none", "clients"));
  const rounds = run.covered.filter((count) => count < classes.length).length;
  place.append(document.createElement("br"), `A class is missing in ${rounds} of ${run.rounds.length} rounds`);
  if (absent.length) place.append(` · did not train in this one: ${absent.map((client) => names[client]).join(", ")}`);
};

// Thousands of clients share the few hundred rows that a screen has.
const MOST_ROWS = 400;
const blockSize = () => Math.ceil(view.group.clients.length / MOST_ROWS);
const blockName = (block, size, most = 30) => {
  const names = view.group.clients;
  const first = names[block * size];
  const last = names[Math.min(names.length, (block + 1) * size) - 1];
  return plain(clipped(size === 1 ? first : `${first} to ${last}`, most));
};

const drawClients = () => {
  const { labels, run: { seed } } = cohortAt(cohortAt("left").labels ? "left" : "right");
  if (!labels) return drawEmpty("clients-chart", NO_LABELS);
  const { classes, clients: names } = view.group;
  const size = blockSize();
  const blocks = Math.ceil(names.length / size);
  const z = classes.map(() => new Array(blocks).fill(0));
  labels.forEach((row, client) => row.forEach((count, c) => { z[c][Math.floor(client / size)] += count; }));
  const gap = Math.max(1, classes.length / 30);
  // Another seed has another partition, whose clients hold other labels than the ones drawn.
  const sides = (view.group.methods.length > 1 ? SIDES : ["left"]).filter((side) => cohortAt(side).run.seed === seed);
  const marks = sides.map((side) => {
    const { method, clients, absent } = cohortAt(side);
    const index = SIDES.indexOf(side);
    return {
      type: "scatter", mode: "markers", x: clients.map((client) => Math.floor(client / size)),
      y: clients.map(() => (index === 0 ? -gap : classes.length - 1 + gap)), cliponaxis: false,
      marker: { color: colourOf(method), symbol: clients.map((client) => (absent.includes(client) ? "x" : index === 0 ? "triangle-up" : "triangle-down")), size: 10 },
      customdata: clients.map((client) => plain(clipped(names[client], 30))), name: shownName(method), meta: method.label,
      hovertemplate: "client %{customdata} chosen by %{fullData.name}<extra></extra>",
    };
  });
  const step = Math.max(1, Math.ceil(blocks / 12));
  const tickvals = [...Array(blocks).keys()].filter((block) => block % step === 0);
  const room = growTo("clients-chart", classes.length + 3, isNarrow() ? 360 : 440);
  return draw("clients-chart", [{
    type: "heatmap", z, colorscale: amounts(), zmin: 0, hoverongaps: false,
    colorbar: { title: { text: "samples", side: "right" }, thickness: 12, outlinewidth: 0 },
    customdata: classes.map((name) => [...Array(blocks).keys()].map((block) => [blockName(block, size), plain(clipped(name, 40))])),
    hovertemplate: "client %{customdata[0]}<br>%{z} × %{customdata[1]}<extra></extra>",
  }, ...marks], layout({
    xaxis: axis("Client", { tickvals, ticktext: tickvals.map((block) => blockName(block, size, 12)), showgrid: false, range: [-0.6, blocks - 0.4] }),
    yaxis: classAxis(room, isNarrow() ? 9 : 20, { range: [-1.8 * gap, classes.length - 1 + 1.8 * gap] }),
    hovermode: "closest",
  }));
};

const drawPicks = (side) => {
  const method = methodOn(side);
  const run = runOf(method);
  const id = `picks-${side}`;
  if (!run.rounds.length) return drawEmpty(id, "The picks of this run are not in the page.");
  const size = blockSize();
  const blocks = Math.ceil(view.group.clients.length / size);
  const z = Array.from({ length: blocks }, () => new Array(run.rounds.length).fill(0));
  let dropped = false;
  run.picks.forEach((cohort, at) => {
    const absent = new Set(run.absent[String(run.rounds[at])] ?? []);
    cohort.forEach((client) => {
      const block = Math.floor(client / size);
      if (size > 1) z[block][at] += 1 / size;
      else z[block][at] = absent.has(client) ? 0.5 : 1;
      dropped ||= absent.has(client);
    });
  });
  const colour = colourOf(method);
  const lost = cssColour("--warn");
  const scale = size > 1 ? [[0, cssColour("--panel")], [1, colour]]
    : [[0, cssColour("--panel")], [0.33, cssColour("--panel")], [0.33, lost], [0.66, lost], [0.66, colour], [1, colour]];
  const step = Math.max(1, Math.ceil(blocks / 10));
  const tickvals = [...Array(blocks).keys()].filter((block) => block % step === 0);
  const meaning = (value) => (value === 0 ? "not chosen" : size > 1 ? `${Math.round(value * size)} chosen` : value === 0.5 ? "chosen, did not train" : "chosen");
  const round = currentRound();
  return draw(id, [{
    type: "heatmap", x: run.rounds, z, colorscale: scale, zmin: 0, zmax: 1, showscale: false,
    text: z.map((row, block) => row.map((value) => `client ${blockName(block, size)}: ${meaning(value)}`)),
    hovertemplate: "round %{x}<br>%{text}<extra></extra>",
  }], layout({
    title: { text: shownName(method) + (dropped ? `<br><span style="font-size:12px;color:${lost}">■ chosen, did not train</span>` : ""), font: { size: 15 }, x: 0.02, xanchor: "left" },
    margin: { l: 54, r: 12, t: dropped ? 54 : 34, b: 46 },
    xaxis: wholeAxis("Round", run.rounds.at(-1), { showgrid: false }),
    yaxis: axis("Client", { tickvals, ticktext: tickvals.map((block) => blockName(block, size, 12)), showgrid: false, autorange: "reversed" }),
    shapes: round === undefined ? [] : [{ x0: round, x1: round, y0: 0, y1: 1, yref: "paper", line: { color: cssColour("--text"), width: 1, dash: "dot" } }],
  }));
};
