// What the model knows of each class, at the end and round by round.
const drawClasses = () => {
  const methods = shownMethods().filter((method) => method.classAccuracy.some((value) => value !== null));
  if (!methods.length) return drawEmpty("classes-chart", "No method that is switched on has accuracies per class.");
  const names = view.group.classes;
  const rows = [...methods].reverse();
  const place = document.getElementById("classes-chart");
  place.style.height = `${Math.max(220, 130 + (isNarrow() ? 22 : 34) * rows.length)}px`;
  const most = lengthApart(rows.map((method) => method.label), isNarrow() ? [24] : [28, 40, 60]);
  const many = names.length > (isNarrow() ? 6 : 25);
  return draw("classes-chart", [{
    type: "heatmap", z: rows.map((method) => method.classAccuracy), zmin: 0, zmax: 100, colorscale: knowledge(), xgap: names.length > (isNarrow() ? 25 : 60) ? 0 : 2, ygap: 2,
    texttemplate: many ? "" : "%{z:.0f}",
    customdata: rows.map((method) => names.map((name) => [plain(clipped(method.label, 80)), plain(clipped(name, 40))])),
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]}: %{z:.1f} %<extra></extra>",
    colorbar: { title: { text: "%", side: "right" }, thickness: 12, outlinewidth: 0 },
  }], layout({
    margin: { l: 54, r: 12, t: 14, b: 46 },
    xaxis: classAxis(place.clientWidth - (isNarrow() ? 220 : 130 + 7 * most), 12),
    yaxis: axis("", { tickvals: rows.map((_, i) => i), ticktext: rows.map((method) => plain(clipped(method.label, most))), tickfont: { size: isNarrow() ? 10 : 13 }, showgrid: false }),
  }));
};

const drawForgetting = (side) => {
  const method = methodOn(side);
  const run = runOf(method);
  const id = `forget-${side}`;
  if (!run.classRounds.length) return drawEmpty(id, "No accuracies per class are kept for this run.");
  const names = view.group.classes;
  const room = growTo(id, names.length, isNarrow() ? 300 : 360);
  return draw(id, [{
    type: "heatmap", x: run.classRounds, z: names.map((_, c) => run.classAccuracy.map((row) => row[c])), zmin: 0, zmax: 100,
    colorscale: knowledge(), showscale: false,
    customdata: names.map((name) => run.classRounds.map(() => plain(clipped(name, 40)))),
    hovertemplate: "round %{x}<br>%{customdata}: %{z:.1f} %<extra></extra>",
  }], layout({
    title: { text: shownName(method), font: { size: 15 }, x: 0.02, xanchor: "left" },
    xaxis: wholeAxis("Round", run.classRounds.at(-1), { showgrid: false }),
    yaxis: classAxis(room, isNarrow() ? 9 : 14),
  }));
};
