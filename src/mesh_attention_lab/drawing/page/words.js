// The explanation next to the picture: the method and tile shown, and the current step.

const KIND_WORDS = {
  q: "Q",
  kv: "K and V",
  do: "dO, LSE and delta",
  o: "partial O with its LSE",
  dq: "partial dQ",
  dkv: "partial dK and dV",
};

const shardsText = (shards) => `shard${shards.length === 1 ? "" : "s"} ${numbersText(shards)}`;
const said = (title, ...sentences) => paragraph(["b", `${title}. `], sentences.filter((one) => one).join(" "));

function drawChoiceWords() {
  const data = pass();
  const parts = [tileWords, ulyssesWords, methodWords, trafficWords, rootWords].map((words) => words(data));
  byId("choice-words").replaceChildren(...parts.filter((part) => part));
  const { text } = DATA.problems[state.scene.problem];
  byId("problem").textContent = `${text}, on ${count(state.scene.ranks, "rank")}; ${data.layout} layout`;
}

const isOneBlock = (data) => data.tile[0] * data.tile[1] === 1;
const isShard = (item, kind) => item.kind === kind && item.form === "whole";
const receivedShards = (kind) =>
  stepsNow().flatMap((step) => step.recvs).filter(({ item }) => isShard(item, kind)).length;

function tileWords(data) {
  const [rows, cols] = data.tile;
  const place = placeOf(data, state.rank);
  const who = data.ulysses === 1 ? `Rank ${state.rank}` : `Place ${place} (ranks ${numbersText(members(data, place))})`;
  if (isOneBlock(data)) {
    const alone = `${who} is the only place in the grid: its tile is one block.`;
    return said("Tile", alone, "Ranks only trade heads for tokens.");
  }
  return said(
    "Tile",
    `${who} computes the blue blocks. Its tile has ${rows} × ${cols} blocks:`,
    `query ${shardsText(qGroup(data, state.rank))} (its Q group)`,
    `against key/value ${shardsText(kvGroup(data, state.rank))} (its KV group).`,
    `It contains block q${place} × kv${place}, so the rank can start`,
    data.ulysses === 1 ? "without waiting for data." : "once heads are traded, without waiting for other places.",
  );
}

function ulyssesWords(data) {
  if (data.ulysses === 1) return null;
  const tile = data.tile.join("x");
  return said(
    "Ulysses",
    `Before the pass, groups of ${data.ulysses} ranks trade heads for tokens. Each rank then has 1/${data.ulysses} of the`,
    `heads for the tokens of all ${data.ulysses}, and together they form one place in the grid.`,
    `The matrix shows the ${count(data.rows.length, "place")}. Results are traded back at the end.`,
    `${data.ulysses}·${tile} is short for groups of ${data.ulysses} and a tile of ${tile}.`,
  );
}

function methodWords(data) {
  const [rows, cols] = data.tile;
  if (isOneBlock(data)) return null;
  if (stepsNow().some((step) => step.verb === "gather")) {
    return said(
      "Method",
      "The ranks first gather everything in large collectives, then attend in a few large calls, then reduce partial",
      "results. They wait while they gather; see the wait lane.",
    );
  }
  if (rows === 1) {
    return said(
      "Method",
      "A tile of one row is Ring-Attention: Q stays at home, and the K and V of all other ranks pass by.",
      data.layout === "zigzag" && "Zigzag gives each rank some early and some late tokens,",
      data.layout === "zigzag" && "so that all ranks have the same work under a causal mask.",
    );
  }
  if (cols === 1) {
    return said(
      "Method",
      "A tile of one column is pass-Q: K and V stay at home, Q passes by, and partial results return to the home of Q.",
    );
  }
  return meshWords(data);
}

// Counted in the program: a mask may spare a rank some shards, and shards kept from forward are not sent again.
function meshWords(data) {
  const q = receivedShards("q");
  const comes = `The rank receives ${count(q, "Q shard")}`;
  const isKept = data.keep.length && state.direction === "backward";
  const kept_ = isKept ? ` (what it gathered of ${data.keep.join(" and ")} was kept from forward)` : "";
  const kvs = `${count(receivedShards("kv"), "KV shard")}${kept_}`;
  if (state.direction === "forward") {
    return said(
      "Method",
      `${comes} and ${kvs}. Each fetch is the one that unlocks the most blocks for its cost.`,
      "A complete row is sent home as a partial O with its LSE, and added up there.",
    );
  }
  return said(
    "Method",
    `${comes} with ${q === 1 ? "its" : "their"} dO, LSE and delta, and ${kvs}.`,
    "Complete rows are sent home as partial dQ, complete columns as partial dKV, and added up there.",
  );
}

function trafficWords(data) {
  const kinds = Object.entries(data.costs.received).filter(([, values]) => values[state.rank] > 0);
  if (!kinds.length) return said("Traffic", `Rank ${state.rank} receives nothing.`);
  const texts = kinds.map(([kind, values]) => `${bytesText(values[state.rank])} of ${KIND_WORDS[kind]}`);
  return said(
    "Traffic",
    `Rank ${state.rank} receives ${bytesText(receivedBy(data, state.rank))}: ${listText(texts)}.`,
    `It holds at most ${bytesText(data.costs.peak[state.rank])} in buffers.`,
  );
}

function rootWords(data) {
  const [rows, cols] = data.tile;
  if (isOneBlock(data)) return null;
  const places = rows * cols;
  const { heads, kv_heads } = DATA.problems[state.scene.problem];
  const wide = heads > kv_heads && [
    `${heads} heads share ${kv_heads} KV heads, so a KV shard is smaller than a Q shard with its result,`,
    "and tiles with more columns than rows send less.",
  ].join(" ");
  if (rows === 1 || cols === 1) {
    return said(
      "Why it matters",
      `A line of ${places} blocks needs up to ${places - 1} shards from other places.`,
      `A square tile with as many blocks would have sides of about √${places} = ${digits(Math.sqrt(places))}.`,
      wide,
    );
  }
  const spared = receivedShards("q") + receivedShards("kv") < rows + cols - 2 && !data.keep.length;
  return said(
    "Why √n",
    `The work is the area of the tile, ${rows} × ${cols} = ${places} blocks. The traffic is its two sides,`,
    `${rows - 1} + ${cols - 1} shards from other places. With ring it would be ${places - 1}.`,
    spared && "Here the mask spares this rank some of them.",
    "Both sides of a square tile are √n, so traffic falls as ranks are added.",
    wide,
  );
}

// The current step

function updateNowWords() {
  const step = stepsNow()[state.step];
  const found = situation(state.scene, state.direction, state.rank, state.step);
  byId("now-words").replaceChildren(step ? nowParagraph(step) : endParagraph(), stockList(found));
}

function nowParagraph(step) {
  const times = stepTimes(state.scene, state.direction, "forecast", state.rank);
  const now = times && times[state.step];
  const parts = [];
  if (now && now.stop - now.first - now.waited > 1e-9) parts.push(timeText(now.stop - now.first - now.waited));
  if (now && now.waited > 1e-9) parts.push(`${timeText(now.waited)} of waiting`);
  const when = parts.length ? ` Forecast: ${listText(parts)}.` : "";
  return paragraph(["code", cutText(step.text, 64)], html("br"), `${verbWords(step)}${when}`);
}

const endParagraph = () => paragraph(`Rank ${state.rank} is done: its tile is computed, and its results are at home.`);

function sizeWords(item) {
  const sizes = pass().sizes[item.kind];
  return item.form === "piece" || item.form === "staged" || sizes === undefined ? "" : ` (${bytesText(sizes[item.shard])})`;
}

const itemsText = (transfers) => someText(transfers.map(({ item }) => item.text));
// Ranks as the step has them, such as 0,4,8-11.
const groupText = (group) =>
  numbersText(group.split(",").flatMap((run) => {
    const [first, last = first] = run.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  }));

function verbWords(step) {
  const { verb, item, sends, recvs } = step;
  const group = step.group && groupText(step.group);
  const words = {
    recv: () =>
      `Posts a receive of ${item.text}${sizeWords(item)} from rank ${recvs[0].peer} and continues. ` +
      "The first step that reads it waits for it.",
    send: () => `Posts a send of ${item.text}${sizeWords(item)} to rank ${sends[0].peer} and continues.`,
    attend: () => attendWords(step),
    pack: () => `Copies its own ${item.kind} into the form that travels.`,
    merge: () => `Adds the partial that rank ${item.source} sent to its own sum.`,
    clear: () => "Sets the sum to zero: the mask leaves nothing to add.",
    finish: () =>
      item.form === "home"
        ? "The sum is complete. It is the rank’s result."
        : `The sum ${item.kind}${item.shard}~ is complete. It is rounded to the dtype in which it is sent.`,
    free: () => `Frees the memory of ${item.text}, which is no longer needed.`,
    gather: () =>
      `The ranks of the group (${group}) send each other their shards. This rank receives ${itemsText(recvs)}, ` +
      "and continues. The first step that reads a shard waits for it.",
    reduce: () => `The ranks of the group (${group}) send partial results home. This rank receives ${itemsText(recvs)}.`,
    exchange: () =>
      `Ranks ${group} begin to trade heads for tokens, or back: ${item.text} becomes ${step.after.text}. ` +
      "The first step that reads it waits for it.",
    unpack: () => `Puts the result together: its own part of ${item.text}, and what the others sent.`,
  };
  return words[verb]();
}

function attendWords(step) {
  const rows = step.rows.map(({ shard }) => shard);
  const blocks = rows.length * step.cols.length;
  const sums =
    state.direction === "forward"
      ? rows.map((shard) => `o${shard}~`)
      : [...rows.map((shard) => `dq${shard}~`), ...step.cols.map(({ shard }) => `dkv${shard}~`)];
  const named = sums.length > 4 ? count(sums.length, "running sum") : sums.join(", ");
  return `Computes ${count(blocks, "block")} (orange in the matrix) and adds the results to ${named}.`;
}

function stockList(found) {
  const data = pass();
  const kvs = kvGroup(data, state.rank);
  const live = qGroup(data, state.rank).flatMap((row) => kvs.filter((col) => patternOf(data, row, col) !== "0")).length;
  const named = (wanted) => [...found.held].filter(([, value]) => wanted.includes(value)).map(([name]) => name);
  const rows = {
    done: `${found.done.size} of ${count(live, "block")}`,
    holds: someText(named(["own", "here"])),
    "on its way": someText(named(["coming"])),
  };
  const pairs = Object.entries(rows).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
  return html("dl", { class: "stock" }, ...pairs);
}
