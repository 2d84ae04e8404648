// Programs and timelines as the plan has them: offsets become numbers, ticks become seconds.

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
  return remembered(`steps ${sceneKey(scene)} ${direction} ${rank}`, () => {
    const data = scene.passes[direction];
    const text = data.texts[at(data.text_of, rank)];
    const isRelative = !text.startsWith("=");
    const lines = (isRelative ? text : text.slice(1)).split("\n").filter((line) => line);
    return lines.map((line) => parseStep(isRelative ? absolute(line, data, rank) : line));
  });
}

// Offsets back into numbers

function absolute(line, data, rank) {
  const place = placeOf(data, rank);
  const slice = rank % data.ulysses;
  const start = rank - slice;
  const shard = (kind, offset) => data[AXIS[kind]][place][offset];
  const peer = (kind, offset) => shard(kind, offset) * data.ulysses + slice;
  const ahead = (distance) => (slice + distance) % data.ulysses;
  const isExchange = line.startsWith("exchange");
  const item = (text) => {
    const [, form, kind, number, part = "", sum_, source, heads] = ITEM.exec(text);
    if (form === "kept:") return `${form}${kind}${shard(kind, number)}${part}`;
    if (form) return `${form}${kind}${rank}${part}`;
    if (heads !== undefined) return `${kind}${start + ahead(Number(number))}${part}/${ahead(Number(heads))}`;
    return `${kind}${shard(kind, number)}${part}${sum_ || ""}${source === undefined ? "" : `@${peer(kind, source)}`}`;
  };
  const transfer = (text) => {
    const [verb, what, way, number] = text.split(" ");
    const kind = ITEM.exec(what)[2];
    return `${verb} ${item(what)} ${way} ${isExchange ? start + ahead(Number(number)) : peer(kind, number)}`;
  };
  const [verb] = line.split(" ", 1);
  if (verb === "recv" || verb === "send") return transfer(line);
  if (verb === "attend") return attendLine(line, item);
  if (verb === "gather" || verb === "reduce" || isExchange) {
    const [head, rest] = line.replace(/:$/, ": ").split(": ");
    const words = head.split(" ");
    const group = isExchange
      ? Array.from({ length: data.ulysses }, (_, index) => start + index)
      : data[`${words[2]}s`][place].map((member) => member * data.ulysses + slice).sort((a, b) => a - b);
    if (isExchange) [words[1], words[3]] = [item(words[1]), item(words[3])];
    words[words.length - 1] = runs(group);
    return `${words.join(" ")}: ${rest.split("; ").filter((text) => text).map(transfer).join("; ")}`.trim();
  }
  return line.split(" ").map((word) => (ITEM.test(word) ? item(word) : word)).join(" ");
}

// Items of an attend stand in order of shard.
function attendLine(line, item) {
  return line
    .split(" ")
    .map((word, index) => {
      if (index % 2 === 0) return word;
      const shardOf = (text) => Number(/\d+/.exec(text)[0]);
      return word.split(",").map(item).sort((a, b) => shardOf(a) - shardOf(b)).join(",");
    })
    .join(" ");
}

function runs(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
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

// Spans of one rank by lane, in seconds, with the step or transfer each belongs to; null if there are none.
function spansOf(scene, direction, source, rank) {
  const timeline = scene.passes[direction][source];
  if (!timeline || !(rank in timeline.spans)) return null;
  return remembered(`spans ${sceneKey(scene)} ${direction} ${source} ${rank}`, () => {
    const steps = stepsOf(scene, direction, rank);
    const sends = steps.flatMap((step, index) => step.sends.map((one) => ({ ...one, step: index })));
    const recvs = steps.flatMap((step, index) => step.recvs.map((one) => ({ ...one, step: index })));
    const lanes = { compute: [], wait: [], send: [], recv: [] };
    for (const [lane, numbers] of Object.entries(timeline.spans[rank])) {
      let begun = 0;
      for (let i = 0; i < numbers.length; i += 3) {
        begun += numbers[i + 1];
        const span = { lane, start: begun * timeline.tick_s, stop: (begun + numbers[i + 2]) * timeline.tick_s };
        const moved = { send: sends, recv: recvs }[lane];
        lanes[lane].push({ ...span, ...meaning(numbers[i], moved, steps, timeline.names) });
      }
    }
    return lanes;
  });
}

function meaning(what, moved, steps, names) {
  if (what < 0) return { step: null, name: names[-1 - what], item: null };
  if (!moved) return { step: what, name: steps[what].text, item: null };
  const { step, item, peer, verb } = moved[what];
  return { step, name: `${item.text} ${verb === "recv" ? "from" : "to"} ${peer}`, item: item.text, index: what };
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
