// Line styles and the plain look that all charts share. Which colour, line and mark a method has comes with the data.
const isDark = () => document.documentElement.dataset.theme === "dark";
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Plotly reads a little HTML and, between dollar signs, formulas in labels; names from users are shown as they are.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
// Long names lose their middle: names of one kind mostly differ at the end.
const clipped = (text, most = 18) => {
  const letters = [...String(text)];
  const end = Math.floor(most * 0.3);
  return letters.length > most ? `${letters.slice(0, most - 1 - end).join("")}…${letters.slice(-end).join("")}` : String(text);
};
// The first of these lengths at which no two names read alike, else the last.
const lengthApart = (names, lengths) => lengths.find((most) => new Set(names.map((name) => clipped(name, most))).size === names.length) ?? lengths.at(-1);

const colourOf = (method) => (isDark() ? method.style.dark : method.style.light);
const lineOf = (method, more = {}) => ({ color: colourOf(method), width: 2.2, dash: method.style.dash, ...more });
// A few marks along a line, where there are so many methods that colours alone do not tell them apart.
const markOf = (method) => ({ color: colourOf(method), symbol: method.style.mark ?? "circle", size: 8, maxdisplayed: 8 });
const modeOf = (method, points) => (points < 2 ? "markers" : method.style.mark ? "lines+markers" : "lines");
const faded = (colour, opacity) => {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
};

const isTouch = () => window.matchMedia("(pointer: coarse)").matches;
const isNarrow = () => window.innerWidth < 760;

const axis = (title, more = {}) => ({
  title: { text: title, standoff: 8 },
  gridcolor: cssColour("--line"),
  linecolor: cssColour("--line"),
  zeroline: false,
  automargin: true,
  ...more,
});

// An axis of classes: as many names as there is room for, `room` in pixels; slanted ones need more of it.
const classAxis = (room, most, more = {}) => {
  const names = view.group.classes;
  const step = Math.max(1, Math.ceil((names.length * (more.tickangle ? 22 : 15)) / room));
  const tickvals = names.map((_, c) => c).filter((c) => c % step === 0);
  return axis("Class", { tickvals, ticktext: tickvals.map((c) => plain(clipped(names[c], most))), showgrid: false, ...more });
};
// Charts with a row for each class (or method) grow with them; past forty, names are left out instead.
const growTo = (id, rows, least) => {
  const height = Math.max(least, 100 + 15 * Math.min(rows, 40));
  document.getElementById(id).style.height = `${height}px`;
  return height - 100;
};

// Rounds and picks are whole numbers, so are the marks of their axes.
const wholeAxis = (title, most, more = {}) => axis(title, { tickformat: "d", ...(most <= 10 ? { dtick: 1 } : {}), ...more });

const layout = (more = {}) => ({
  autosize: true, // also when a chart that is drawn again has become higher or lower
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: cssColour("--text") },
  margin: { l: 54, r: 12, t: 28, b: 46 },
  showlegend: false,
  // A finger that scrolls the page must not zoom the chart.
  dragmode: isTouch() ? false : "zoom",
  hoverlabel: { bgcolor: cssColour("--panel"), bordercolor: cssColour("--line"), font: { color: cssColour("--text") }, align: "left" },
  ...more,
});

const draw = (id, traces, chartLayout) => {
  const place = document.getElementById(id);
  const note = place.querySelector(":scope > .empty");
  if (note) note.remove();
  offerPicture(place);
  // No toolbar: a double click undoes a zoom, and the picture has a button of its own.
  return Plotly.react(place, traces, chartLayout, { responsive: true, displayModeBar: false });
};

// A button above the chart that is seen once the chart is pointed at, or the button reached by keyboard.
const offerPicture = (place) => {
  if (place.previousElementSibling?.classList.contains("tools")) return;
  const tools = document.createElement("div");
  tools.className = "tools";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Save picture";
  button.setAttribute("aria-label", `Save as a picture: ${place.getAttribute("aria-label")}`);
  button.addEventListener("click", () => Plotly.downloadImage(...pictureOf(place.id)));
  tools.append(button);
  place.before(tools);
};

// A chart as it goes into a picture, which has to speak for itself: with its title, its setting and a legend.
const pictureOf = (id) => {
  const place = document.getElementById(id);
  const width = Math.max(640, place.clientWidth);
  const heading = place.closest("section").querySelector("h2").textContent;
  const own = place.layout.title?.text ? `, ${place.layout.title.text}` : "";
  const round = id.startsWith("cohort-") || id === "clients-chart" ? `, round ${currentRound() ?? "–"}` : "";
  const named = place.data.filter((trace) => trace.meta);
  const longest = Math.max(0, ...named.map((trace) => trace.name.length));
  const columns = Math.max(1, Math.floor((width - 40) / (60 + 7.5 * longest)));
  const legend = named.length ? 24 * Math.ceil(named.length / columns) + 16 : 0;
  const { margin } = place.layout;
  const below = place.layout.showlegend ? 60 : margin.b + 14; // one that shows its legend has made room for it
  return [{
    data: place.data.map((trace) => ({ ...trace, showlegend: Boolean(trace.meta) })),
    layout: {
      ...place.layout, width, height: place.clientHeight - margin.b - margin.t + below + legend + 64, autosize: false,
      paper_bgcolor: cssColour("--page"), plot_bgcolor: cssColour("--page"),
      margin: { ...margin, t: 64, b: below + legend },
      title: { text: `${plain(heading)}${round}${own}<br><span style="font-size:12px">${plain(clipped(view.group.title, Math.floor(width / 7)))}</span>`, font: { size: 16 }, x: 0.02, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 14 } },
      showlegend: named.length > 0,
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, maxheight: 1, entrywidth: 1 / columns, entrywidthmode: "fraction" },
    },
  }, { format: "svg", width, height: place.clientHeight - margin.b - margin.t + below + legend + 64, filename: `fedentopt-${id}` }];
};

const drawEmpty = (id, reason) => {
  const place = document.getElementById(id);
  if (place.data) Plotly.purge(place);
  if (place.previousElementSibling?.classList.contains("tools")) place.previousElementSibling.remove();
  const note = document.createElement("div");
  note.className = "empty";
  note.textContent = reason;
  place.replaceChildren(note);
};

// Sequential scales that stay readable in grey: light to dark on white, dark to light on black.
const AMOUNTS = { light: [[0, "#ffffff"], [0.001, "#deebf7"], [0.5, "#56a0ce"], [1, "#08306b"]], dark: [[0, "#12161c"], [0.001, "#1d3450"], [0.5, "#3a87bd"], [1, "#d6ecfb"]] };
const amounts = () => (isDark() ? AMOUNTS.dark : AMOUNTS.light);
// Accuracies the other way round: what the model does not know is what should catch the eye.
const KNOWLEDGE = { light: [[0, "#8a3200"], [0.15, "#d55e00"], [0.4, "#f6c9a0"], [0.6, "#cfe3f1"], [1, "#3b8fc4"]], dark: [[0, "#f2a566"], [0.15, "#c8662a"], [0.4, "#6b4530"], [0.6, "#25455e"], [1, "#2f86bd"]] };
const knowledge = () => (isDark() ? KNOWLEDGE.dark : KNOWLEDGE.light);
