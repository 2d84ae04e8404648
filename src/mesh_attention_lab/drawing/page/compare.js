// This scene next to the others: bytes that a rank receives, and times of each pass and of both.

const receivedBy = (data, rank) => sum(Object.values(data.costs.received).map((values) => values[rank]));

function mostReceived(scene, direction) {
  const data = scene.passes[direction];
  return Math.max(...Array.from({ length: scene.ranks }, (_, rank) => receivedBy(data, rank)));
}

// The one-row tile without Ulysses, under any name.
const isRing = (scene) => Object.values(scene.passes).every((data) => data.tile[0] === 1 && data.ulysses === 1);
const ringBeside = () => rivals().find((scene) => isRing(scene) && state.direction in scene.passes);
const sceneName = (scene) => `${scene.method} ${scene.tile}`;

function drawCompare() {
  const scenes = rivals().filter((scene) => state.direction in scene.passes);
  byId("compare-title").textContent = `Comparison: ${state.scene.ranks} ranks, ${state.direction}`;
  byId("compare-words").replaceChildren(...compareWords());
  const received = scenes.map((scene) => ({ scene, value: mostReceived(scene, state.direction) }));
  const both = directions(state.scene);
  byId("compare").replaceChildren(
    barTable("Bytes the busiest rank receives (exact)", received, bytesText),
    timeTable("Forecast time of the pass", scenes, [state.direction]),
    ...(both.length > 1 ? [timeTable("Forecast time of both passes", scenes, both)] : []),
  );
}

function timeTable(title, scenes, passes) {
  const rows = scenes
    .filter((scene) => passes.every((direction) => direction in scene.passes))
    .map((scene) => ({
      scene,
      value: total(scene, passes, "forecast", "time_s"),
      exposed: total(scene, passes, "forecast", "exposed_s"),
      measured: total(scene, passes, "measured", "time_s"),
    }));
  return barTable(title, rows, timeText);
}

// Seconds of some passes together; null unless all of them are known.
function total(scene, passes, source, name) {
  const found = passes.map((direction) => scene.passes[direction][source]);
  return found.every((data) => data) ? sum(found.map((data) => data[name])) : null;
}

function barTable(title, rows, text) {
  const largest = Math.max(...rows.flatMap((row) => [row.value, row.measured || 0])) || 1;
  const body = rows.map((row) => barRow(row, largest, text));
  return html("div", { class: "bars", role: "group", "aria-label": title }, html("h3", {}, title), ...body);
}

function barRow({ scene, value, exposed, measured }, largest, text) {
  const isChosen = scene === state.scene;
  const picture = svg("svg", { viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": true });
  const bar = (name, start, stop, y, height) => {
    const [x, width] = [start, stop - start].map((length) => round((100 * length) / largest));
    picture.append(svg("rect", { class: name, x, y, height, width }));
  };
  const [y, height] = measured ? [1, 6] : [2, 10];
  const busy = value - Math.max(0, exposed || 0);
  bar("forecast", 0, busy, y, height);
  bar("exposed", busy, value, y, height);
  const small = (words) => html("small", {}, words);
  if (measured) bar("measured", 0, measured, 8, 5);
  return html(
    "button",
    { type: "button", class: "bar-row", "data-scene": sceneKey(scene), "aria-pressed": isChosen ? "true" : "false" },
    html("span", { class: "bar-name" }, sceneName(scene)),
    html("span", { class: "bar" }, picture),
    html(
      "span",
      { class: "bar-value" },
      text(value),
      exposed === undefined ? null : small(`${text(Math.max(0, exposed))} exposed`),
      measured ? small(`${text(measured)} measured`) : null,
    ),
  );
}

function compareWords() {
  const ring = ringBeside();
  const mine = mostReceived(state.scene, state.direction);
  const time = pass().forecast.time_s;
  if (!ring) return [paragraph(`A rank receives ${bytesText(mine)}. This page has no ring to compare it with.`)];
  if (ring === state.scene) return ringWords(mine, time);
  const others = mostReceived(ring, state.direction);
  const ringTime = ring.passes[state.direction].forecast.time_s;
  return [
    paragraph(
      ...["A rank receives ", ["b", bytesText(mine)], "; with ring ", ["b", bytesText(others)]],
      `: ${ratioText(mine, others)}. `,
      ...["The forecast is ", ["b", timeText(time)], "; with ring ", ["b", timeText(ringTime)]],
      `: ${ratioText(time, ringTime, "shorter", "longer", "as long")}.`,
    ),
  ];
}

function ringWords(mine, time) {
  const least = rivals()
    .filter((scene) => state.direction in scene.passes)
    .sort((a, b) => mostReceived(a, state.direction) - mostReceived(b, state.direction))[0];
  const fewest = mostReceived(least, state.direction);
  if (fewest === mine) {
    return [paragraph("A rank receives ", ["b", bytesText(mine)], " with ring. No other method here receives less.")];
  }
  return [
    paragraph(
      ...["With ring a rank receives ", ["b", bytesText(mine)], `, and the forecast is ${timeText(time)}. `],
      ...["The least here is ", ["b", bytesText(fewest)], ` with ${sceneName(least)}: ${ratioText(fewest, mine)}.`],
    ),
  ];
}

// More ranks

function growthRows() {
  const named = (scene) => DATA.problems[scene.problem].text === DATA.problems[state.scene.problem].text;
  const scenes = DATA.scenes.filter((scene) => named(scene) && state.direction in scene.passes);
  const rows = new Map();
  for (const scene of scenes) {
    const received = mostReceived(scene, state.direction);
    const points = rows.get(scene.method) || rows.set(scene.method, new Map()).get(scene.method);
    points.set(scene.ranks, Math.min(received, points.get(scene.ranks) ?? Infinity));
  }
  return rows;
}

function drawGrowth() {
  const rows = growthRows();
  const ranks = distinct([...rows.values()].flatMap((points) => [...points.keys()])).sort((a, b) => a - b);
  byId("growth-part").hidden = ranks.length < 3;
  if (ranks.length < 3) return;
  byId("growth-words").textContent = [
    "Bytes that a rank receives, by method, with the tile that receives the least.",
    "Ring stays high, because every K and V passes every rank.",
    "The sides of a square tile are √n, so its traffic falls with √n.",
  ].join(" ");
  const box = byId("growth");
  const names = [...rows.keys()].map((method) => cutText(method, 22));
  const right = 14 + 7.2 * Math.max(...names.map((name) => name.length));
  const height = Math.max(190, 40 + 15 * rows.size, overviewHeight(state.scene.ranks));
  const [width, left, top] = [box.clientWidth, 66, 10];
  const largest = Math.max(...[...rows.values()].flatMap((points) => [...points.values()]));
  const doublings = Math.log2(ranks[ranks.length - 1] / ranks[0]);
  const x = (number) => left + (Math.log2(number / ranks[0]) / doublings) * (width - left - right);
  const y = (value) => top + (1 - value / largest) * (height - top - 30);
  const picture = svg("svg", { width, height, class: "growth", role: "img", "aria-label": growthLabel(rows) });
  drawGrowthAxes(picture, ranks, largest, x, y, width - right);
  const ends = [];
  let index = 0;
  for (const [method, points] of rows) picture.append(growthLine(method, points, index++, x, y, ends));
  spreadLabels(ends);
  for (const { method, y: height_ } of ends) {
    const name = method === state.scene.method ? "small mine" : "small";
    picture.append(label(width - right + 8, height_ + 4, cutText(method, 22), { class: name }));
  }
  box.replaceChildren(picture);
}

function growthLabel(rows) {
  const texts = (points) => [...points].map(([ranks, value]) => `${bytesText(value)} on ${ranks} ranks`);
  return [...rows].map(([method, points]) => `${method}: ${texts(points).join(", ")}`).join("; ");
}

function drawGrowthAxes(picture, ranks, largest, x, y, end) {
  for (const share of [0, 0.5, 1]) {
    const at_ = round(y(largest * share));
    picture.append(svg("line", { class: "rule", x1: x(ranks[0]), x2: end, y1: at_, y2: at_ }));
    const words = share ? bytesText(largest * share) : "0";
    picture.append(label(x(ranks[0]) - 8, at_ + 4, words, { class: "small", "text-anchor": "end" }));
  }
  for (const number of ranks) {
    picture.append(label(x(number), y(0) + 18, `${number}`, { class: "small", "text-anchor": "middle" }));
  }
  picture.append(label(x(ranks[0]) - 14, y(0) + 18, "ranks", { class: "small", "text-anchor": "end" }));
}

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2"];

function growthLine(method, points, index, x, y, ends) {
  const places = [...points].sort(([a], [b]) => a - b).map(([ranks, value]) => [round(x(ranks)), round(y(value))]);
  const isChosen = method === state.scene.method;
  const group = svg("g", { class: `growth-line${isChosen ? " chosen" : ""}` });
  const points_ = places.map((place) => place.join(",")).join(" ");
  group.append(svg("polyline", { points: points_, "stroke-dasharray": DASHES[index % DASHES.length] }));
  for (const [cx, cy] of places) group.append(svg("circle", { cx, cy, r: isChosen ? 3.5 : 2.5 }));
  ends.push({ method, y: places[places.length - 1][1] });
  return group;
}

// Labels keep 14 pixels between them.
function spreadLabels(ends) {
  ends.sort((a, b) => a.y - b.y);
  for (let i = ends.length - 2; i >= 0; i -= 1) ends[i].y = Math.min(ends[i].y, ends[i + 1].y - 14);
  const lift = Math.max(0, 12 - (ends.length ? ends[0].y : 12));
  for (const end of ends) end.y += lift;
}
