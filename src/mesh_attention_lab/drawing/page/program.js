// Programs and timelines, read from the page's data.

const AXIS = { q: "rows", do: "rows", o: "rows", dq: "rows", kv: "cols", dkv: "cols" };
const INPUTS = { forward: ["q", "kv"], backward: ["q", "do", "kv"] };
const ITEM = /^(home:|staged:|kept:)?([a-z]+)(\d+)(\.\d+)?(?:(~)|@(\d+)|\/(\d+))?$/;
const kept = new Map();

function remembered(key, workOut) {
  if (!kept.has(key)) kept.set(key, workOut());
  return kept.get(key);
}

const sceneKey = (scene) => DATA.scenes.indexOf(scene);
const placeOf = (data, rank) => Math.floor(rank / data.ulysses);
const qGroup = (data, rank) => data.rows[placeOf(data, rank)];
const kvGroup = (data, rank) => data.cols[placeOf(data, rank)];
const stepsNow = () => stepsOf(state.scene, state.direction, state.rank);

function stepsOf(scene, direction, rank) {
  return remembered(`steps ${sceneKey(scene)} ${direction} ${rank}`, () =>
    scene.passes[direction].programs[rank].map(parseStep),
  );
}

// Steps from their text

function parseItem(text) {
  const [, prefix, kind, shard, , sum_, source, heads] = ITEM.exec(text);
  const form = prefix ? prefix.slice(0, -1) : sum_ ? "running" : heads !== undefined ? "piece" : "whole";
  return { text, kind, shard: Number(shard), form, source: source === undefined ? null : Number(source) };
}

function parseTransfer(text) {
  const [verb, item, , peer] = text.split(" ");
  return { verb, item: parseItem(item), peer: Number(peer) };
}

function parseStep(text) {
  const words = text.split(" ");
  const step = { text, verb: words[0], sends: [], recvs: [], rows: [], cols: [], grads: [], item: null };
  if (step.verb === "recv" || step.verb === "send") {
    step[`${step.verb}s`] = [parseTransfer(text)];
    step.item = step[`${step.verb}s`][0].item;
  } else if (step.verb === "attend") {
    step.rows = words[1].split(",").map(parseItem);
    step.cols = words[3].split(",").map(parseItem);
    if (words[5]) step.grads = words[5].split(",").map(parseItem);
  } else if (["gather", "reduce", "exchange"].includes(step.verb)) {
    const moved = (text.split(": ")[1] || "").split("; ").filter((part) => part).map(parseTransfer);
    step.sends = moved.filter((one) => one.verb === "send");
    step.recvs = moved.filter((one) => one.verb === "recv");
    if (step.verb === "exchange") [step.item, step.after] = [parseItem(words[1]), parseItem(words[3])];
    step.group = text.split(": ")[0].replace(/:$/, "").split(" ").pop();
  } else {
    step.item = parseItem(words[1]);
    if (step.verb === "pack" || step.verb === "unpack") step.after = parseItem(words[3]);
  }
  return step;
}

// Timelines

// Spans of one rank by lane, in seconds; those of transfers with the item that is sent. Null if there are none.
function spansOf(scene, direction, source, rank) {
  const timeline = scene.passes[direction][source];
  if (!timeline || !(rank in timeline.spans)) return null;
  return remembered(`spans ${sceneKey(scene)} ${direction} ${source} ${rank}`, () => {
    const span = (lane) => ([start, stop, step, name]) => {
      const isTransfer = step !== null && (lane === "send" || lane === "recv");
      return { lane, start, stop, step, name, item: isTransfer ? name.split(" ")[0] : null };
    };
    return Object.fromEntries(Object.entries(timeline.spans[rank]).map(([lane, spans]) => [lane, spans.map(span(lane))]));
  });
}

// When each step begins and ends, and since when it waits; steps that take no time are where the last one ended.
function stepTimes(scene, direction, source, rank) {
  const lanes = spansOf(scene, direction, source, rank);
  if (!lanes) return null;
  return remembered(`times ${sceneKey(scene)} ${direction} ${source} ${rank}`, () => {
    const steps = stepsOf(scene, direction, rank);
    const busy = new Map();
    for (const span of [...lanes.compute, ...lanes.wait]) {
      if (span.step === null) continue;
      const one = busy.get(span.step) || { first: span.start, start: null, stop: span.stop, waited: 0 };
      one.first = Math.min(one.first, span.start);
      one.stop = Math.max(one.stop, span.stop);
      if (span.lane === "compute") one.start = span.start;
      else one.waited += span.stop - span.start;
      busy.set(span.step, one);
    }
    let now = 0;
    return steps.map((_, index) => {
      const one = busy.get(index);
      if (!one) return { first: now, start: now, stop: now, waited: 0 };
      now = Math.max(now, one.stop);
      return { ...one, start: one.start === null ? one.stop : one.start };
    });
  });
}

// What a rank has and has done before a step

function situation(scene, direction, rank, step) {
  const data = scene.passes[direction];
  const steps = stepsOf(scene, direction, rank);
  const found = { held: new Map(), done: new Set(), now: new Set(), sums: new Map(), sent: new Set() };
  const own = placeOf(data, rank);
  const block = (row, col) => `${row.shard},${col.shard}`;
  const parts = (name) => Array.from({ length: data.waves }, (_, part) => (part ? `${name}.${part}` : name));
  const hold = (name, how) => parts(name).forEach((part) => found.held.set(part, how));
  if (data.ulysses === 1) for (const kind of INPUTS[direction]) hold(`${kind}${own}`, "own");
  for (const kind of direction === "backward" ? data.keep : []) {
    if (kind === "own") ["q", "kv"].forEach((input) => hold(`kept:${input}${own}`, "own"));
    else for (const shard of data[AXIS[kind]][own]) hold(`${kind}${shard}`, shard === own ? "own" : "here");
  }
  const times = new Map();
  steps.slice(0, step).forEach((one, index) => {
    for (const { item } of one.recvs) if (item.form === "whole") found.held.set(item.text, { posted: index });
    for (const send of one.sends) if (send.item.form === "whole") found.sent.add(send.item.text);
    if (one.verb === "exchange" && one.after.form !== "staged") found.held.set(one.after.text, { posted: index });
    if (one.verb === "free") found.held.set(one.item.text, "gone");
    for (const row of one.rows) {
      for (const col of one.cols) {
        const name = block(row, col);
        times.set(name, (times.get(name) || 0) + 1);
        if (times.get(name) === data.waves) found.done.add(name); // a wave attends a part of it
      }
    }
    if (one.verb === "finish" || one.verb === "unpack") {
      found.sums.set(`${one.item.kind}${one.item.form === "home" ? own : one.item.shard}`, "finished");
    }
  });
  const current = steps[step];
  if (current) for (const row of current.rows) for (const col of current.cols) found.now.add(block(row, col));
  settleArrivals(found, scene, direction, rank, step);
  return found;
}

// A posted receive is on its way until the forecast says it is over, or, without one, until a step reads it.
function settleArrivals(found, scene, direction, rank, step) {
  const lanes = spansOf(scene, direction, "forecast", rank);
  const times = stepTimes(scene, direction, "forecast", rank);
  const steps = stepsOf(scene, direction, rank);
  const now = times ? (step < times.length ? times[step].start : Infinity) : null;
  const overAt = new Map((lanes ? lanes.recv : []).filter((span) => span.item).map((span) => [span.item, span.stop]));
  for (const [name, value] of found.held) {
    if (typeof value === "string") continue;
    const isHolding = ["gather", "reduce"].includes(steps[value.posted].verb);
    const isOver = overAt.has(name) ? overAt.get(name) <= now + 1e-12 : wasRead(steps, name, value.posted, step);
    found.held.set(name, isHolding || isOver ? "here" : "coming");
  }
}

function wasRead(steps, name, posted, step) {
  const reads = (one) =>
    [...one.rows, ...one.cols, ...one.grads, ...one.sends.map(({ item }) => item)].some(({ text }) => text === name) ||
    (["merge", "free"].includes(one.verb) && one.item.text === name);
  return steps.slice(posted + 1, step + 1).some(reads);
}
