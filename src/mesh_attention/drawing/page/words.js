// The explanation beside the picture: what this choice means, and what happens now.

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
    const alone = `${who} is the only place of the grid: its tile is one block.`;
    return said("Tile", alone, "Only heads and tokens are exchanged.");
  }
  return said(
    "Tile",
    `${who} computes the blue blocks; its tile is ${rows} × ${cols} blocks:`,
    `query ${shardsText(qGroup(data, state.rank))} (its Q group)`,
    `against key/value ${shardsText(kvGroup(data, state.rank))} (its KV group).`,
    `It contains block q${place} × kv${place}, so the rank can start with what it has.`,
  );
}

function ulyssesWords(data) {
  if (data.ulysses === 1) return null;
  return said(
    "Ulysses",
    `Before the pass, runs of ${data.ulysses} ranks exchange heads for tokens: each then has 1/${data.ulysses} of the`,
    `heads for the tokens of all ${data.ulysses}, and together they act as one place of the grid.`,
    `The matrix shows the ${count(data.rows.length, "place")}. Results are exchanged back at the end.`,
  );
}

function methodWords(data) {
  const [rows, cols] = data.tile;
  if (isOneBlock(data)) return null;
  if (stepsNow().some((step) => step.verb === "gather")) {
    return said(
      "Method",
      "Everything is gathered in large collectives first, then attended in a few large calls, then partial results are",
      "reduced. The ranks wait while they gather; look at the wait lane.",
    );
  }
  if (rows === 1) {
    return said(
      "Method",
      "One row is ring attention: Q stays at home, and K and V of the others come past.",
      data.layout === "zigzag" && "Zigzag gives each rank an early and a late run of tokens,",
      data.layout === "zigzag" && "so that a causal mask leaves all the same work.",
    );
  }
  if (cols === 1) {
    return said(
      "Method",
      "One column is pass-Q: K and V stay at home, Q goes round, and partial results go back to the home of the Q.",
    );
  }
  return meshWords(data);
}

// Counted in the program: a mask may spare a rank some shards, and what was kept from forward is not sent again.
function meshWords(data) {
  const q = receivedShards("q");
  const comes = `The rank receives ${count(q, "Q shard")}`;
  const isKept = data.keep.length && state.direction === "backward";
  const kept_ = isKept ? ` (what it gathered of ${data.keep.join(" and ")} was kept from forward)` : "";
  const kvs = `${count(receivedShards("kv"), "KV shard")}${kept_}`;
  if (state.direction === "forward") {
    return said(
      "Method",
      `${comes} and ${kvs}, in the order that unlocks most blocks for its price.`,
      "A row that is complete leaves as a partial O with its LSE, and its home adds it up.",
    );
  }
  return said(
    "Method",
    `${comes} with ${q === 1 ? "its" : "their"} dO, LSE and delta, and ${kvs}.`,
    "A row that is complete leaves as partial dQ, a column as partial dKV; their homes add them up.",
  );
}

function trafficWords(data) {
  const kinds = Object.entries(data.costs.received).filter(([, values]) => at(values, state.rank) > 0);
  if (!kinds.length) return said("Traffic", `Rank ${state.rank} receives nothing.`);
  const texts = kinds.map(([kind, values]) => `${bytesText(at(values, state.rank))} of ${KIND_WORDS[kind]}`);
  return said(
    "Traffic",
    `Rank ${state.rank} receives ${bytesText(receivedBy(data, state.rank))}: ${listText(texts)}.`,
    `It holds at most ${bytesText(at(data.costs.peak, state.rank))} in buffers.`,
  );
}

function rootWords(data) {
  const [rows, cols] = data.tile;
  if (isOneBlock(data)) return null;
  const places = rows * cols;
  const { heads, kv_heads } = DATA.problems[state.scene.problem];
  const wide = heads > kv_heads && [
    `${heads} heads share ${kv_heads} KV heads, so a KV shard is lighter than a Q shard with its result,`,
    "and tiles with more columns than rows send less.",
  ].join(" ");
  if (rows === 1 || cols === 1) {
    return said(
      "Why it matters",
      `A line of ${places} blocks needs up to ${places - 1} shards of others.`,
      `A square tile of as many blocks would have sides of about √${places} = ${digits(Math.sqrt(places))}.`,
      wide,
    );
  }
  const spared = receivedShards("q") + receivedShards("kv") < rows + cols - 2 && !data.keep.length;
  return said(
    "Why √n",
    `The work is the tile’s area, ${rows} × ${cols} = ${places} blocks; what must come in is its two sides,`,
    `${rows - 1} + ${cols - 1} shards of others. With ring it would be ${places - 1}.`,
    spared && "Here the mask spares this rank some of them.",
    "For a square tile both sides are √n, so traffic falls as ranks are added.",
    wide,
  );
}

// What happens now

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
  const when = parts.length ? ` By the forecast it takes ${listText(parts)}.` : "";
  return paragraph(["code", cutText(step.text, 64)], html("br"), `${verbWords(step)}${when}`);
}

const endParagraph = () => paragraph(`Rank ${state.rank} is done: its tile is computed, and its results are home.`);

function sizeWords(item) {
  const sizes = pass().sizes[item.kind];
  return item.form === "piece" || sizes === undefined ? "" : ` (${bytesText(at(sizes, item.shard))})`;
}

const itemsText = (transfers) => transfers.map(({ item }) => item.text).join(", ") || "nothing";

function verbWords(step) {
  const { verb, item, group, sends, recvs } = step;
  const words = {
    recv: () =>
      `Posts a receive of ${item.text}${sizeWords(item)} from rank ${recvs[0].peer}, and goes on: ` +
      "the first step that reads it will wait for it.",
    send: () => `Posts a send of ${item.text}${sizeWords(item)} to rank ${sends[0].peer}, and goes on.`,
    attend: () => attendWords(step),
    pack: () => `Copies its own ${item.kind} into the form that travels.`,
    merge: () => `Adds the partial that rank ${item.source} sent to its own sum.`,
    clear: () => "Sets a sum to zero, because the mask leaves nothing to add.",
    finish: () =>
      item.form === "home"
        ? "The sum is complete: this is the rank’s result."
        : `The sum ${item.kind}${item.shard}~ is complete: it is rounded to the dtype that travels.`,
    free: () => `${item.text} is not needed any more; its memory is free.`,
    gather: () =>
      `The ranks of the group (${group}) give each other theirs; this one receives ${itemsText(recvs)}, ` +
      "and waits until all have arrived.",
    reduce: () => `The group (${group}) sends partial results to their homes; this rank receives ${itemsText(recvs)}.`,
    exchange: () => `Ranks ${group} trade heads for tokens, or back: ${item.text} becomes ${step.after.text}.`,
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
  return `Computes ${count(blocks, "block")}, orange in the matrix, and adds to ${named}.`;
}

function stockList(found) {
  const data = pass();
  const kvs = kvGroup(data, state.rank);
  const live = qGroup(data, state.rank).flatMap((row) => kvs.filter((col) => patternOf(data, row, col) !== "0")).length;
  const named = (wanted) => [...found.held].filter(([, value]) => wanted.includes(value)).map(([name]) => name);
  const short = (names) =>
    names.length > 9 ? `${names.slice(0, 8).join(", ")} and ${names.length - 8} more` : names.join(", ") || "nothing";
  const rows = {
    done: `${found.done.size} of ${count(live, "block")}`,
    holds: short(named(["own", "here"])),
    "on its way": short(named(["coming"])),
  };
  const pairs = Object.entries(rows).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
  return html("dl", { class: "stock" }, ...pairs);
}
