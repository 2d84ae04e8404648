// Timelines: the chosen rank's lanes, forecast above measured; both passes at a glance; all ranks.

const LANES = ["compute", "wait", "send", "recv"];
const SOURCES = ["forecast", "measured"];
const LANE_HEIGHT = 20;
const LEFT = 76;
const SOURCE_WORDS = { forecast: "Forecast", measured: "Measured" };

const sourcesOf = (data) => SOURCES.filter((source) => data[source]);

// The longest timeline that is drawn for a pass.
const passTime = (data) => Math.max(...sourcesOf(data).map((source) => data[source].time_s)) || 1e-9;

function longestTime() {
  return Math.max(...Object.values(state.scene.passes).map(passTime));
}

function drawTimeline() {
  const data = pass();
  const { width, stop, scale } = timelineLayout(data);
  const picture = svg("svg", { width, class: "timeline", role: "img", "aria-label": timelineLabel(data) });
  let top = drawPasses(picture, width, 4);
  const known = sourcesOf(data).filter((source) => state.rank in data[source].spans);
  for (const source of known) top = drawSource(picture, source, scale, top + 14, width);
  if (known.length) drawAxis(picture, stop, scale, top);
  picture.setAttribute("height", top + (known.length ? 24 : 0));
  byId("timeline").replaceChildren(picture);
  drawTimelineWords(data);
  showSpan(null);
  updateTimeline();
}

function timelineLayout(data) {
  const width = byId("timeline").clientWidth;
  const stop = passTime(data);
  return { width, stop, scale: (seconds) => LEFT + (seconds / stop) * (width - LEFT - 12) };
}

function timelineLabel(data) {
  return `Timeline of rank ${state.rank}, ${state.direction}: ${sourcesOf(data)
    .map((source) => `${source} ${timeText(data[source].time_s)}`)
    .join(", ")}`;
}

// Both passes on one scale: how long each is, and how much of it is exposed.
function drawPasses(picture, width, top) {
  const longest = longestTime();
  const room = width - LEFT - 150;
  let y = top;
  for (const direction of directions(state.scene)) {
    const data = state.scene.passes[direction];
    const isChosen = direction === state.direction;
    const group = svg("g", { class: `pass-row${isChosen ? " chosen" : ""}`, "data-direction": direction });
    const name = { class: `lane-name${isChosen ? " chosen" : ""}`, "data-direction": direction };
    group.append(label(0, y + 11, direction, name));
    for (const source of sourcesOf(data)) {
      const { time_s, compute_s } = data[source];
      const [length, busy] = [time_s, compute_s].map((seconds) => (seconds / longest) * room);
      group.append(svg("rect", { class: `exposed ${source}`, x: LEFT, y: y + 2, width: round(length), height: 10 }));
      group.append(svg("rect", { class: `compute ${source}`, x: LEFT, y: y + 2, width: round(busy), height: 10 }));
      group.append(label(LEFT + length + 6, y + 11, `${timeText(time_s)} ${source}`, { class: "small" }));
      y += 16;
    }
    picture.append(group);
  }
  return y + 4;
}

function drawSource(picture, source, scale, top, width) {
  const lanes = spansOf(state.scene, state.direction, source, state.rank);
  const name = `${SOURCE_WORDS[source]}: rank ${state.rank}, ${state.direction}`;
  picture.append(label(0, top + 11, name, { class: "source-name" }));
  const begin = top + 20;
  const group = svg("g", { class: `lanes ${source}`, "data-source": source });
  LANES.forEach((lane, index) => {
    const y = begin + index * (LANE_HEIGHT + 4);
    group.append(svg("rect", { class: "track", x: LEFT, y, width: width - LEFT - 12, height: LANE_HEIGHT }));
    group.append(label(0, y + 14, lane, { class: "lane-name" }));
  });
  const bottom = begin + LANES.length * (LANE_HEIGHT + 4) - 4;
  group.append(svg("rect", { class: "cursor-band", y: begin - 3, height: bottom - begin + 6, width: 0 }));
  LANES.forEach((lane, index) => {
    group.append(...laneSpans(lanes[lane], lane, begin + index * (LANE_HEIGHT + 4), scale));
  });
  group.append(svg("line", { class: "cursor", y1: begin - 4, y2: bottom + 4 }));
  picture.append(group);
  return bottom;
}

// Why there are no lanes, if there are none.
function missingWords(source, data) {
  const ranks = Object.keys(data.spans).map(Number);
  if (ranks.includes(state.rank)) return "";
  if (!ranks.length) return `Of the ${source} pass, only totals are known.`;
  return [
    `The ${source} timeline of rank ${state.rank} is not on this page. To keep the page small, it has those of`,
    `${count(ranks.length, "rank")} of ${state.scene.ranks}, spread from the first to the last: choose`,
    `${numbersText(ranks)}.`,
  ].join(" ");
}

// Spans of one lane that overlap are drawn side by side.
function laneSpans(spans, lane, top, scale) {
  const tracks = [];
  const placed = spans.map((span) => {
    let track = tracks.findIndex((stop) => stop <= span.start + 1e-12);
    if (track < 0) track = tracks.push(0) - 1;
    tracks[track] = span.stop;
    return track;
  });
  const height = LANE_HEIGHT / Math.max(1, tracks.length);
  return spans.flatMap((span, index) => {
    const [x, end] = [scale(span.start), scale(span.stop)];
    const width = Math.max(0.75, end - x - (end - x > 3 ? 0.75 : 0));
    const y = top + placed[index] * height;
    const tall = round(Math.max(1, height - (tracks.length > 1 ? 0.5 : 0)));
    const box = { x: round(x), y: round(y), width: round(width), height: tall };
    const about = { "data-words": spanWords(span), "data-step": span.step === null ? "" : span.step };
    const shape = svg("rect", { class: `span ${lane}`, ...box, ...about });
    const words = shortName(span);
    if (height < 12 || width < 6.2 * words.length + 8) return [shape];
    const attributes = { class: `span-name ${lane}`, "text-anchor": "middle" };
    return [shape, label(x + width / 2, y + height / 2 + 3.5, words, attributes)];
  });
}

function shortName(span) {
  if (span.lane === "wait") return "";
  return span.item || span.name.replace(/^attend /, "").replace(/ with .*/, "").replaceAll("home:", "");
}

function spanWords(span) {
  const verb = { compute: "", wait: "waits before ", send: "sends ", recv: "receives " }[span.lane];
  return `${verb}${span.name}: ${timeText(span.start)} to ${timeText(span.stop)}, ${timeText(span.stop - span.start)}`;
}

function drawAxis(picture, stop, scale, top) {
  const [unit, factor] = timeUnit(stop);
  const axis = svg("g", { class: "axis" });
  for (const tick of roundTicks(stop / factor, 8)) {
    const x = round(scale(tick * factor));
    axis.append(svg("line", { x1: x, x2: x, y1: top + 2, y2: top + 6 }));
    const words = tick === 0 ? `0 ${unit}` : `${round(tick)}`;
    axis.append(label(x, top + 18, words, { "text-anchor": "middle", class: "small" }));
  }
  picture.append(axis);
}

function drawTimelineWords(data) {
  const words = sourcesOf(data).map((source) => {
    const { time_s, exposed_s, utilisation, is_exact } = data[source];
    const rough = source === "forecast" && !is_exact ? " (approximate: some ranks are priced like their neighbours)" : "";
    return [
      `${SOURCE_WORDS[source]}${rough}: ${timeText(time_s)} until the last rank is done,`,
      `of which ${timeText(exposed_s)} is exposed;`,
      `all ranks together compute ${Math.round(100 * utilisation)} % of the time.`,
      missingWords(source, data[source]),
    ].join(" ");
  });
  if (!data.measured) words.push("This pass was not run, so nothing measured is shown.");
  byId("timeline-words").textContent = words.join(" ");
}

function updateTimeline() {
  const data = pass();
  const box = byId("timeline");
  const { scale } = timelineLayout(data);
  for (const source of sourcesOf(data)) {
    const lanes = box.querySelector(`.lanes.${source}`);
    const times = stepTimes(state.scene, state.direction, source, state.rank);
    if (!lanes || !times || !times.length) continue;
    const end = data[source].stop[state.rank];
    const now = times[state.step] || { first: end, start: end, stop: end };
    const x = round(scale(now.start));
    fill(lanes.querySelector(".cursor"), { x1: x, x2: x }, []);
    const band = { x: round(scale(now.first)), width: round(Math.max(0, scale(now.stop) - scale(now.first))) };
    fill(lanes.querySelector(".cursor-band"), band, []);
    for (const span of lanes.querySelectorAll(".span")) {
      span.classList.toggle("current", span.dataset.step !== "" && Number(span.dataset.step) === state.step);
    }
  }
}

// The chosen rank's compute and waiting as a thin strip above the player, with the step's place in it.

function drawStrip() {
  const box = byId("strip");
  const lanes = spansOf(state.scene, state.direction, "forecast", state.rank);
  box.hidden = !lanes;
  if (!lanes) return;
  const stop = pass().forecast.time_s || 1e-9;
  const part = (spans, name) => {
    return svg("path", { class: name, d: stripPath(joined(spans), (seconds) => (1000 * seconds) / stop, 0, 6) });
  };
  const picture = svg("svg", { viewBox: "0 0 1000 6", preserveAspectRatio: "none" });
  picture.append(part(lanes.wait, "wait"), part(lanes.compute, "compute"));
  picture.append(svg("line", { id: "strip-cursor", y1: 0, y2: 6 }));
  box.replaceChildren(picture);
}

function updateStrip() {
  const times = stepTimes(state.scene, state.direction, "forecast", state.rank);
  if (!times || !byId("strip-cursor")) return;
  const { forecast } = pass();
  const now = times[state.step] ? times[state.step].start : forecast.stop[state.rank];
  const x = round((1000 * now) / (forecast.time_s || 1e-9));
  fill(byId("strip-cursor"), { x1: x, x2: x }, []);
}

// All ranks

const overviewRowHeight = (ranks) => Math.max(3, Math.min(80, 210 / ranks));
const overviewHeight = (ranks) => ranks * overviewRowHeight(ranks) + 30;

function drawOverview() {
  const box = byId("overview");
  const data = pass();
  const source = "forecast";
  const timeline = data[source];
  const ranks = state.scene.ranks;
  const width = box.clientWidth;
  const left = 30;
  const height = overviewRowHeight(ranks);
  const scale = (seconds) => left + (seconds / (timeline.time_s || 1e-9)) * (width - left - 4);
  const hasAll = Object.keys(timeline.spans).length === ranks;
  const words = `Compute and waiting of all ${ranks} ranks`;
  const about = { class: "overview", role: "img", "aria-label": words };
  const picture = svg("svg", { width, height: overviewHeight(ranks), ...about });
  for (let rank = 0; rank < ranks; rank += 1) picture.append(overviewRow(timeline, rank, height, scale, hasAll));
  drawAxis(picture, timeline.time_s || 1e-9, scale, ranks * height + 6);
  box.replaceChildren(picture);
  const [what, whole] = hasAll ? ["When", ""] : ["How long", ", in total,"];
  byId("overview-words").textContent = [
    `${what} each rank computes (blue) and waits (amber)${whole} in the forecast, ${state.direction}.`,
    "Click to choose a rank.",
  ].join(" ");
}

function overviewRow(timeline, rank, height, scale, hasAll) {
  const y = rank * height + 6;
  const bar = Math.max(2, height - 1.5);
  const group = svg("g", { class: `rank-row${rank === state.rank ? " chosen" : ""}`, "data-rank": rank });
  const end = timeline.stop[rank];
  const spans = hasAll
    ? joined(spansOf(state.scene, state.direction, "forecast", rank).compute)
    : [{ start: 0, stop: timeline.compute[rank] }];
  const whole = round(scale(timeline.time_s));
  group.append(svg("rect", { class: "hit", x: 0, y: round(y), width: whole, height: round(height) }));
  group.append(svg("path", { class: "idle", d: stripPath([{ start: 0, stop: end }], scale, y, bar) }));
  group.append(svg("path", { class: "busy", d: stripPath(spans, scale, y, bar) }));
  const isNear = rank !== state.rank && Math.abs(rank - state.rank) * height < 12;
  if (height >= 10 || rank === state.rank || (rank % 8 === 0 && !isNear)) {
    const name = rank === state.rank ? "small mine" : "small";
    group.append(label(24, y + bar / 2 + 3.5, `${rank}`, { "text-anchor": "end", class: name }));
  }
  return group;
}

function stripPath(spans, scale, top, height) {
  const box = ({ start, stop }) =>
    `M${round(scale(start))} ${round(top)}H${round(scale(stop))}V${round(top + height)}H${round(scale(start))}Z`;
  return spans.map(box).join("");
}

function joined(spans) {
  const found = [];
  for (const { start, stop } of spans) {
    const last = found[found.length - 1];
    if (last && start <= last.stop + 1e-9) last.stop = Math.max(last.stop, stop);
    else found.push({ start, stop });
  }
  return found;
}
