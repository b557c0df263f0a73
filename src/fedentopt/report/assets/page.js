// What is shown, and what happens when a control moves.
const view = { group: null, left: 0, right: 0, seed: 0, rounds: [] };
const byId = (id) => document.getElementById(id);

const drawRound = () => {
  byId("round-number").textContent = currentRound() ?? "–";
  SIDES.forEach(drawCohort);
  byId("noisy").hidden = !SIDES.some((side) => cohortAt(side).run.noisy);
  drawClients();
};
const markRound = () => SIDES.forEach((side) => {
  const round = currentRound();
  if (byId(`picks-${side}`).data && round !== undefined) Plotly.relayout(`picks-${side}`, { "shapes[0].x0": round, "shapes[0].x1": round });
});
const drawSides = () => {
  SIDES.forEach((side) => { drawPicks(side); drawForgetting(side); });
};
const drawShown = () => {
  drawAccuracy();
  drawEntropy();
  drawClasses();
  drawParticipation();
  drawBytes();
  drawBelief();
  drawSuspects();
};
const drawAll = () => {
  if (!view.group) return;
  paintSwatches();
  drawShown();
  drawRound();
  drawSides();
};

// One seed for everything that shows single clients, chosen above the cohorts or above the suspects.
const seedSelects = () => [byId("seed"), byId("suspects-seed")].filter(Boolean);

// Rounds and seeds to step through depend on the two methods that are compared.
const useSides = () => {
  const round = view.rounds.length ? currentRound() : undefined;
  view.rounds = keptRounds();
  const slider = byId("round");
  slider.max = Math.max(0, view.rounds.length - 1);
  slider.disabled = view.rounds.length < 2;
  slider.value = Math.max(0, view.rounds.indexOf(round));
};

// Parts that are there for some settings of the page only.
const showBeliefs = () => {
  for (const [id, wanted] of [["belief", hasBeliefs()], ["suspects", hasSuspects()]]) {
    // A link to a part that is not shown would lead nowhere.
    document.querySelectorAll(`#${id}, nav a[href="#${id}"]`).forEach((part) => { part.hidden = !wanted; });
  }
  const liars = byId("liars-note");
  if (liars) liars.hidden = !view.group.methods.some((method) => method.belief?.liarsAmongAll);
};

const fillSelect = (select, options, chosen) => {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === chosen)));
};

const fillMethods = () => {
  const place = byId("method-list");
  place.replaceChildren();
  byId("method-switches").hidden = view.group.methods.length < 4;
  byId("method-filter").hidden = view.group.methods.length < 8;
  byId("method-filter").value = "";
  view.group.methods.forEach((method, index) => {
    method.shown ??= true;
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = method.shown;
    box.dataset.method = index;
    box.addEventListener("change", () => { method.shown = box.checked; countMethods(); drawShown(); });
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("width", "26");
    line.setAttribute("height", "10");
    line.setAttribute("aria-hidden", "true");
    line.setAttribute("viewBox", "0 0 26 10");
    const name = document.createElement("span");
    name.textContent = method.label;
    label.append(box, line, name);
    place.append(label);
  });
  countMethods();
};
const countMethods = () => {
  const { methods } = view.group;
  byId("methods-count").textContent = `${methods.filter((method) => method.shown).length} of ${methods.length}`;
};
// Which methods the box lists, by what their names hold.
const findMethods = () => {
  const wanted = byId("method-filter").value.trim().toLowerCase();
  byId("method-list").querySelectorAll("label").forEach((label) => { label.hidden = !label.textContent.toLowerCase().includes(wanted); });
};

const GLYPHS = { circle: "●", square: "■", "triangle-up": "▲", diamond: "◆", cross: "✚", x: "✖", star: "★", "triangle-down": "▼", pentagon: "⬟", hexagon: "⬢", bowtie: "⧓" };
const SVG_DASHES = { solid: "", dash: "7 4", dot: "2 4", dashdot: "7 3 2 3", longdash: "11 4" };
const paintSwatches = () => {
  const number = byId("group") ? byId("group").value : "0";
  view.group.methods.forEach((method, index) => {
    const colour = colourOf(method);
    const line = byId("method-list").querySelectorAll("svg")[index];
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": SVG_DASHES[method.style.dash] })) stroke.setAttribute(name, value);
    line.replaceChildren(stroke);
    if (method.style.mark) {
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "text");
      for (const [name, value] of Object.entries({ x: 13, y: 9.5, "text-anchor": "middle", "font-size": 13, fill: colour })) mark.setAttribute(name, value);
      mark.textContent = GLYPHS[method.style.mark];
      line.append(mark);
    }
    const row = document.querySelector(`#summary .of-group[data-group="${number}"] tr[data-method="${index}"] .swatch`);
    if (row) row.style.background = colour;
  });
};

const showGroup = async (number) => {
  const group = await loadGroup(number);
  view.group = group;
  view.left = group.left;
  view.right = group.right;
  document.querySelectorAll(".of-group").forEach((part) => { part.hidden = part.dataset.group !== String(number); });
  if (byId("group")) byId("group").value = String(number);
  byId("setting").textContent = group.title;
  document.documentElement.toggleAttribute("data-single", group.methods.length === 1);
  byId("thinned").hidden = !group.thinned.length;
  byId("thinned").textContent = `To keep this page small, ${group.thinned.join(", ")}; totals and tables use everything.`;
  const methods = group.methods.map((method, index) => [String(index), method.label]);
  fillSelect(byId("left"), methods, String(view.left));
  fillSelect(byId("right"), methods, String(view.right));
  const seeds = [...new Set(group.methods.flatMap((method) => method.runs.map((run) => run.seed)))].sort((a, b) => a - b);
  // Side by side means the same partition, so the first look is at a seed that both have.
  view.seed = seeds.find((seed) => SIDES.every((side) => methodOn(side).runs.some((run) => run.seed === seed))) ?? seeds[0];
  for (const select of seedSelects()) {
    fillSelect(select, seeds.map((seed) => [String(seed), String(seed)]), String(view.seed));
    select.disabled = seeds.length < 2;
  }
  showBeliefs();
  const target = byId("target");
  target.min = group.targets[0] ?? 0;
  target.max = group.targets.at(-1) ?? 0;
  // The first look asks: what did it take the others to get where the left method ever got?
  const reached = group.methods[view.left].costs.filter((cost) => cost && cost[2] === group.methods[view.left].seeds).length;
  target.value = group.targets[Math.max(0, reached - 1)] ?? 0;
  view.rounds = [];
  byId("round").value = 0;
  useSides();
  byId("round").value = tellingRound();
  fillMethods();
  drawAll();
};

// Where the stepping starts: the first round in which the left cohort lacks a class and the right one has them all.
const tellingRound = () => {
  const [left, right] = SIDES.map((side) => runOf(methodOn(side)));
  const full = (run, round) => run.covered[run.rounds.indexOf(round)] === view.group.classes.length;
  return Math.max(0, view.rounds.findIndex((round) => !full(left, round) && full(right, round)));
};

const step = (by) => {
  const slider = byId("round");
  slider.value = Math.min(Number(slider.max), Math.max(0, Number(slider.value) + by));
  drawRound();
  markRound();
};

// The next round, from here and then from the start, in which one of the two cohorts lacks a class.
const stepToGap = () => {
  const lacking = new Set(SIDES.flatMap((side) => {
    const run = runOf(methodOn(side));
    return run.rounds.filter((_, at) => run.covered[at] < view.group.classes.length);
  }));
  const here = Number(byId("round").value);
  const order = [...view.rounds.keys()].map((i) => (here + 1 + i) % view.rounds.length);
  const found = order.find((i) => lacking.has(view.rounds[i]));
  if (found !== undefined) step(found - here);
};

let playing = null;
const play = () => {
  const stop = playing !== null;
  if (stop) clearInterval(playing);
  else if (Number(byId("round").value) >= Number(byId("round").max)) step(-view.rounds.length); // from the start again
  playing = stop ? null : setInterval(() => {
    const slider = byId("round");
    if (Number(slider.value) >= Number(slider.max)) play();
    else step(1);
  }, 700);
  byId("play").setAttribute("aria-pressed", String(!stop));
  byId("play").textContent = stop ? "Play" : "Stop";
};

const setTheme = (dark) => {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(dark));
  byId("theme").textContent = dark ? "Light" : "Dark";
};

const wire = () => {
  for (const [name, bar] of [["--bar", document.querySelector(".bar")], ["--methods", byId("methods")]]) {
    new ResizeObserver(() => document.documentElement.style.setProperty(name, `${bar.offsetHeight}px`)).observe(bar);
  }
  for (const side of SIDES) byId(side).addEventListener("change", (event) => { view[side] = Number(event.target.value); useSides(); drawRound(); drawSides(); });
  for (const select of seedSelects()) {
    select.addEventListener("change", () => {
      view.seed = Number(select.value);
      seedSelects().forEach((other) => { other.value = select.value; });
      useSides();
      drawRound();
      drawSides();
      drawParticipation();
      drawSuspects();
    });
  }
  byId("round").addEventListener("input", () => step(0));
  byId("same-scale").addEventListener("change", drawRound);
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("gap").addEventListener("click", stepToGap);
  // The first two switch what the box lists; the last one everything.
  for (const [id, wanted, all] of [["all-methods", () => true], ["no-methods", () => false], ["two-methods", (index) => index === view.left || index === view.right, true]]) {
    byId(id).addEventListener("click", () => {
      byId("method-list").querySelectorAll("label").forEach((label, index) => {
        if (!all && label.hidden) return;
        view.group.methods[index].shown = wanted(index);
        label.querySelector("input").checked = wanted(index);
      });
      countMethods();
      drawShown();
    });
  }
  byId("method-filter").addEventListener("input", findMethods);
  byId("methods-toggle").addEventListener("click", () => {
    const open = byId("methods").toggleAttribute("data-open");
    byId("methods-toggle").setAttribute("aria-expanded", String(open));
  });
  byId("play").addEventListener("click", play);
  byId("target").addEventListener("input", drawBytes);
  byId("participation-order").addEventListener("change", drawParticipation);
  byId("auc-of")?.addEventListener("change", drawBelief);
  byId("suspects-list")?.addEventListener("toggle", listClients);
  byId("theme").addEventListener("click", () => { setTheme(!isDark()); drawAll(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { setTheme(event.matches); drawAll(); });
  byId("group")?.addEventListener("change", (event) => showGroup(Number(event.target.value)));
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-show-group]");
    if (button) showGroup(Number(button.dataset.showGroup)).then(() => byId("summary").scrollIntoView());
  });
};

setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches);
(async () => {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack them; any browser from 2023 on can");
  await loadPlotly();
  wire();
  await showGroup(0);
  document.documentElement.dataset.ready = "true";
})().catch((error) => {
  const problem = byId("problem");
  problem.hidden = false;
  problem.textContent = `The charts cannot be shown: ${error.message}`;
  throw error;
});
