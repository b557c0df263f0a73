// Colours, line styles and the plain look that all charts share.
// Okabe and Ito's palette: told apart by readers with any common colour vision. The neutral one goes to plain
// averaging, the blues to entropy selection; past eight methods the dashes tell them apart.
const PALETTE = ["#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#0072B2", "#56B4E9"];
// Yellow cannot be seen on white: there it is olive.
const ON_WHITE = { "#F0E442": "#8F8300" };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

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

const styleMethods = (group) => {
  let next = 0;
  group.methods.forEach((method, index) => {
    if (index === group.left && group.methods.length > 1) method.style = { light: "#000000", dark: "#FFFFFF", dash: "solid" };
    else if (index === group.right) method.style = { light: "#0072B2", dark: "#3D9BD6", dash: "solid" };
    else {
      const colour = PALETTE[next % PALETTE.length];
      method.style = { light: ON_WHITE[colour] ?? colour, dark: colour, dash: DASHES[Math.min(DASHES.length - 1, 1 + Math.floor(next / PALETTE.length))] };
      if (next < 4) method.style.dash = "solid";
      next += 1;
    }
  });
};
const colourOf = (method) => (isDark() ? method.style.dark : method.style.light);
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
  return Plotly.react(place, traces, chartLayout, {
    responsive: true,
    displaylogo: false,
    displayModeBar: isTouch() ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg", filename: id },
  });
};

const drawEmpty = (id, reason) => {
  const place = document.getElementById(id);
  if (place.data) Plotly.purge(place);
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
