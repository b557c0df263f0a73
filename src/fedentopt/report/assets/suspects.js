// Clients one by one as an audit sees them: who is suspected, beside who lies.
const audited = (methods) => methods.filter((method) => runOf(method).clients?.distance.some((value) => value !== null));
const hasSuspects = () => audited(view.group.methods).length > 0;
const KINDS = [
  { liar: false, name: "honest", symbol: "circle", light: "#0072B2", dark: "#56B4E9" },
  { liar: true, name: "liar", symbol: "diamond", light: "#D55E00", dark: "#EE7A22" },
  { liar: null, name: "not known who lies", symbol: "square", light: "#57606a", dark: "#a3adb9" },
];
const kindOf = (liar) => KINDS.find((kind) => kind.liar === liar);
const counted = (value, digits) => (value === null ? "–" : value.toFixed(digits));

const drawSuspects = () => {
  if (!document.getElementById("suspects") || !hasSuspects()) return;
  listClients();
  const id = "suspects-chart";
  const methods = audited(shownMethods());
  if (!methods.length) return drawEmpty(id, "No method that is switched on has an audit.");
  const seen = methods.map((method) => {
    const { clients } = runOf(method);
    return { clients, at: clients.number.map((_, i) => i).filter((i) => clients.distance[i] !== null) };
  });
  const values = seen.flatMap(({ clients, at }) => [...at.map((i) => clients.distance[i]), clients.threshold ?? 0]);
  const most = Math.max(1, ...seen.flatMap(({ clients, at }) => at.map((i) => clients.chosen[i])));
  const note = (method) => {
    const { clients, seed } = runOf(method);
    return [clients.verdicts, clients.unseen ? `${clients.unseen} not seen yet` : "", seed === view.seed ? "" : `seed ${seed}`].filter(Boolean);
  };
  const { axes, titles, margin, on } = panels(id, methods, {
    height: isNarrow() ? 240 : 290, notes: note, foot: isNarrow() ? 80 : 34,
    x: wholeAxis("Times chosen", most, { range: [-0.7, most + 0.7] }),
    y: axis("Distance of report and training", { range: [Math.min(0, ...values) - 0.04, Math.max(...values) * 1.06 + 0.02] }),
  });
  const look = (kind) => ({ color: isDark() ? kind.dark : kind.light, symbol: kind.symbol, size: kind.liar ? 9 : 7, opacity: 0.85, line: { width: 0.6, color: cssColour("--page") } });
  const ring = { color: cssColour("--text"), symbol: "circle-open", size: 15, line: { width: 1.6 } };
  const box = { ...ring, symbol: "square-open" };
  const quarantined = methods.map((method) => method.belief.policy === "quarantine");
  const line = { color: cssColour("--soft"), width: 1.5, dash: "dash" };
  const traces = seen.flatMap(({ clients, at }, panel) => {
    const points = (which, more) => ({
      type: "scatter", mode: "markers", x: which.map((i) => beside(clients.chosen[i], clients.number[i])), y: which.map((i) => clients.distance[i]),
      showlegend: false, ...on(panel), ...more,
    });
    return [
      ...KINDS.map((kind) => {
        const which = at.filter((i) => clients.liar[i] === kind.liar);
        return points(which, { marker: look(kind), name: kind.name, text: which.map((i) => aboutClient(clients, i)), hovertemplate: "%{text}<extra></extra>" });
      }),
      points(at.filter((i) => clients.suspected[i]), { marker: quarantined[panel] ? box : ring, name: "suspected", hoverinfo: "skip" }),
    ].filter((trace) => trace.x.length);
  });
  const present = KINDS.filter((kind) => seen.some(({ clients }) => clients.liar.includes(kind.liar)));
  const legend = [
    ...present.map((kind) => legendEntry(kind.name, { mode: "markers", marker: look(kind) })),
    ...(quarantined.includes(false) ? [legendEntry("suspected", { mode: "markers", marker: ring })] : []),
    ...(quarantined.includes(true) ? [legendEntry("in quarantine", { mode: "markers", marker: box })] : []),
    legendEntry("threshold", { mode: "lines", line }),
  ];
  const shapes = seen.flatMap(({ clients }, panel) => {
    const { xaxis, yaxis } = on(panel);
    return clients.threshold === null ? [] : [{ type: "line", xref: `${xaxis} domain`, x0: 0, x1: 1, yref: yaxis, y0: clients.threshold, y1: clients.threshold, line }];
  });
  document.getElementById(id).setAttribute("aria-label", `Distance between report and training by client. ${methods.map((method) => `${method.label}: ${note(method).join(", ")}`).join("; ")}`);
  return draw(id, [...traces, ...legend], layout({ hovermode: "closest", ...axes, margin, annotations: titles, shapes, showlegend: true, legend: legendBelow }));
};

// Clients that were chosen equally often would cover each other: each is moved sideways by an amount of its own.
const beside = (times, client) => times + (((client + 1) * 0.6180339887) % 1 - 0.5) * 0.5;

const often = (times) => (times === 1 ? "once" : `${times ?? "–"} times`);
const aboutClient = (clients, i) => {
  return [
    `client ${plain(clipped(view.group.clients[clients.number[i]], 30)).replace(/%\{/g, "% {")}: ${kindOf(clients.liar[i]).name}${clients.suspected[i] ? ", suspected" : ""}`,
    `distance ${counted(clients.distance[i], 3)}, suspicion ${counted(clients.suspicion[i], 1)}, agreement ${counted(clients.agreement[i], 2)}`,
    `chosen ${often(clients.chosen[i])}, trained and seen ${often(clients.observed[i])}`,
    `estimate off by ${counted(clients.estimate_error[i], 3)}`,
    `${clients.reported_size[i] ?? "–"} samples reported, ${clients.true_size[i] ?? "–"} true`,
  ].join("<br>");
};

// The same as a table, made when it is opened: there may be thousands.
const LISTED = [["Method", "text"], ["Client", "text"], ["Who", "text"], ["Suspected", "text"], ["Distance", "number"], ["Suspicion", "number"], ["Agreement", "number"], ["Chosen", "number"], ["Seen", "number"], ["Error of estimate", "number"], ["Reported size", "number"], ["True size", "number"]];
const listClients = () => {
  const place = document.getElementById("suspects-table");
  if (!document.getElementById("suspects-list").open) return place.replaceChildren();
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [name, kind] of LISTED) {
    const title = document.createElement("th");
    title.scope = "col";
    title.className = kind;
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.sort = kind;
    button.append(name, document.createElement("span"));
    title.append(button);
    head.append(title);
  }
  const body = table.createTBody();
  const number = (value, digits = 0) => cell("td", counted(value, digits), value ?? "", "number");
  const word = (text) => cell("td", text, text, "text");
  for (const method of shownMethods()) {
    const { clients } = runOf(method);
    (clients?.number ?? []).forEach((client, i) => {
      const suspected = clients.suspected[i];
      body.insertRow().append(
        cell("th", method.label, method.label), word(view.group.clients[client]), word(kindOf(clients.liar[i]).name), word(suspected === null ? "–" : suspected ? "yes" : "no"),
        number(clients.distance[i], 3), number(clients.suspicion[i], 1), number(clients.agreement[i], 2), number(clients.chosen[i]), number(clients.observed[i]), number(clients.estimate_error[i], 3),
        number(clients.reported_size[i]), number(clients.true_size[i]),
      );
    });
  }
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "Clients as the server sees them");
  scroll.append(table);
  place.replaceChildren(scroll);
};
