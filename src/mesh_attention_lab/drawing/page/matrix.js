// The matrix: query shards down, key/value shards across, coloured by who computes a block.

const TONES = 8;
const MARK = 9; // side of the marks that say what the rank has of a shard

// Where a place stands in the grid, and so its tone: neighbours differ.
function toneOf(data, place) {
  const groups = remembered(data.rows, () => distinct(data.rows.map((group) => Math.min(...group))));
  const row = groups.indexOf(Math.min(...data.rows[place]));
  const col = [...data.rows[place]].sort((a, b) => a - b).indexOf(place);
  return (col + 3 * row) % TONES;
}

// Which place computes a block: the one place whose Q group has the row and whose KV group has the column.
function ownerOf(data, row, col) {
  return data.rows[row].find((place) => data.cols[place].includes(col));
}

const patternOf = (data, row, col) => DATA.grids[data.grid][row][col];

// The part of a block that the mask leaves, as a path.
function blockPath(pattern, x, y, side) {
  const lines = pattern.split("/");
  const height = side / lines.length;
  const part = (line, i) => {
    const width = side / line.length;
    return [...line].map((code, j) => partPath(code, x + j * width, y + i * height, width, height));
  };
  return lines.flatMap(part).join("");
}

function partPath(code, x, y, w, h) {
  const [a, b, c, d] = [x, y, x + w, y + h].map(round);
  if (code === "0") return "";
  if (code === "2") return `M${a} ${b}L${c} ${d}H${a}Z`;
  if (code === "3") return `M${a} ${b}H${c}V${d}Z`;
  if (code === "4") return `M${a} ${d}L${round(x + w / 2)} ${b}H${c}L${round(x + w / 2)} ${d}Z`;
  return `M${a} ${b}H${c}V${d}H${a}Z`;
}

function matrixLayout(width, places) {
  const gutter = places > 99 ? 50 : 44;
  const end = 30;
  const cell = Math.min((width - gutter - end) / places, 96);
  return { gutter, end, cell, gap: cell > 10 ? 1.5 : 0.5, side: cell * places, x: (col) => gutter + col * cell };
}

function drawMatrix() {
  const box = byId("matrix");
  const data = pass();
  const places = data.rows.length;
  const own = placeOf(data, state.rank);
  const room = matrixLayout(box.clientWidth, places);
  const full = room.gutter + room.side + room.end;
  const below = state.direction === "forward" ? 2 : room.end; // sums of columns
  const height = room.gutter + room.side + below;
  const picture = svg("svg", { width: full, height, "aria-hidden": true, class: "matrix" });
  picture.append(svg("rect", { class: "ground", x: room.gutter, y: room.gutter, width: room.side, height: room.side }));
  drawBands(picture, data, room, own);
  for (let place = 0; place < places; place += 1) if (place !== own) picture.append(othersTile(data, room, place));
  picture.append(ownTile(data, room, own), shardLabels(data, room, own));
  picture.append(svg("g", { id: "marks" }), svg("rect", { id: "looked-at", width: 0, height: 0 }));
  box.replaceChildren(picture);
  byId("numbers-note").textContent =
    room.cell < 20 ? "" : data.ulysses === 1 ? "numbers: ranks" : `numbers: places of ${data.ulysses} ranks each`;
  updateMatrix();
}

// Faint bands behind the rows of the Q group and the columns of the KV group.
function drawBands(picture, data, room, own) {
  const { gutter, side, cell } = room;
  for (const row of data.rows[own]) {
    picture.append(svg("rect", { class: "band", x: gutter, y: room.x(row), width: side, height: cell }));
  }
  for (const col of data.cols[own]) {
    picture.append(svg("rect", { class: "band", x: room.x(col), y: gutter, width: cell, height: side }));
  }
}

function othersTile(data, room, place) {
  const { cell, gap } = room;
  const blocks = data.rows[place].flatMap((row) => data.cols[place].map((col) => [row, col]));
  const path = (pattern, row, col) => blockPath(pattern, room.x(col) + gap / 2, room.x(row) + gap / 2, cell - gap);
  const patterns = blocks.map(([row, col]) => patternOf(data, row, col));
  const under = blocks.map(([row, col], index) => path(patterns[index] === "0" ? "0" : "1", row, col));
  const shapes = blocks.map(([row, col], index) => path(patterns[index], row, col));
  const group = svg("g", { class: `tile tone-${toneOf(data, place)}`, "data-place": place });
  group.append(svg("path", { class: "under", d: under.join("") }), svg("path", { d: shapes.join("") }));
  if (cell >= 20) for (const [row, col] of blocks) group.append(blockNumber(data, room, row, col, place));
  return group;
}

function ownTile(data, room, own) {
  const { cell, gap } = room;
  const group = svg("g", { class: "own", "data-place": own });
  for (const row of data.rows[own]) {
    for (const col of data.cols[own]) {
      const pattern = patternOf(data, row, col);
      const [x, y, side] = [room.x(col) + gap / 2, room.x(row) + gap / 2, cell - gap];
      const block = svg("g", { class: "block", "data-row": row, "data-col": col });
      block.append(svg("rect", { class: "frame", x: round(x), y: round(y), width: round(side), height: round(side) }));
      block.append(svg("path", { d: blockPath(pattern, x, y, side) }));
      if (cell >= 20) block.append(blockNumber(data, room, row, col, own));
      group.append(block);
    }
  }
  return group;
}

// With Ulysses, a place is several ranks; its number is the place's. Lines of a mask go through the middle of a block,
// so numbers stand at its lower left, if they fit there.
function blockNumber(data, room, row, col, place) {
  if (patternOf(data, row, col) === "0") return null;
  const isWhole = DATA.grids[data.grid].flat().every((pattern) => pattern.length === 1 && "01".includes(pattern));
  const isLow = !isWhole && room.cell / 2 > 8 * `${data.rows.length - 1}`.length;
  const [across, down] = isLow ? [room.cell / 4, (3 * room.cell) / 4] : [room.cell / 2, room.cell / 2];
  const attributes = { class: "number", "text-anchor": "middle" };
  return label(room.x(col) + across, room.x(row) + down + 3.5, `${place}`, attributes);
}

function shardLabels(data, room, own) {
  const group = svg("g", { class: "shards" });
  const { cell, gutter } = room;
  const rows = new Set(data.rows[own]);
  const cols = new Set(data.cols[own]);
  const isRoomy = cell >= 15;
  data.rows.forEach((_, shard) => {
    const middle = room.x(shard) + cell / 2;
    const beside = (words, isMine) => group.append(shardLabel(gutter - MARK - 8, middle + 4, words, "end", isMine));
    const above = (words, isMine) => group.append(shardLabel(middle, gutter - MARK - 9, words, "middle", isMine));
    if (rows.has(shard) && (isRoomy || shard === own)) beside(`q${shard}`, true);
    else if (cell >= 20) beside(`${shard}`, false);
    if (cols.has(shard) && (cell >= 26 || shard === own)) above(`kv${shard}`, true);
    else if (cell >= 20 && !(cell < 26 && Math.abs(shard - own) < 2)) above(`${shard}`, cols.has(shard));
  });
  return group;
}

function shardLabel(x, y, words, anchor, isMine) {
  return label(x, y, words, { "text-anchor": anchor, class: isMine ? "shard mine" : "shard" });
}

// What changes with the step

function updateMatrix() {
  const data = pass();
  const found = situation(state.scene, state.direction, state.rank, state.step);
  const has = (kind, shard) => ["own", "here"].includes(found.held.get(`${kind}${shard}`));
  for (const block of byId("matrix").querySelectorAll(".block")) {
    const [row, col] = [Number(block.dataset.row), Number(block.dataset.col)];
    const key = `${row},${col}`;
    const isReady = INPUTS[state.direction].every((kind) => has(kind, AXIS[kind] === "rows" ? row : col));
    const name = found.now.has(key) ? "now" : found.done.has(key) ? "done" : isReady ? "ready" : "todo";
    block.setAttribute("class", `block ${name}${patternOf(data, row, col) === "0" ? " empty" : ""}`);
  }
  drawMarks(data, found);
  drawLookedAt();
}

function drawMarks(data, found) {
  const own = placeOf(data, state.rank);
  const room = matrixLayout(byId("matrix").clientWidth, data.rows.length);
  const size = Math.min(MARK, Math.max(3, room.cell - 1));
  const near = room.gutter - MARK / 2 - 4;
  const far = room.gutter + room.side + 6;
  const marks = [];
  const rowKinds = state.direction === "forward" ? ["q"] : ["q", "do"];
  for (const row of data.rows[own]) {
    const middle = room.x(row) + room.cell / 2;
    marks.push(inputMark(near, middle, size, worst(rowKinds.map((kind) => found.held.get(`${kind}${row}`)))));
    marks.push(...outputMark(data, found, state.direction === "forward" ? "o" : "dq", row, far, middle, size, false));
  }
  for (const col of data.cols[own]) {
    const middle = room.x(col) + room.cell / 2;
    marks.push(inputMark(middle, near, size, found.held.get(`kv${col}`)));
    if (state.direction === "backward") marks.push(...outputMark(data, found, "dkv", col, far, middle, size, true));
  }
  byId("marks").replaceChildren(...marks);
}

function worst(values) {
  return [undefined, "coming", "gone", "here", "own"].find((value) => values.includes(value));
}

// Here: filled. On its way: an arrow's head. Gone: a dot. Not yet: hollow.
function inputMark(x, y, size, value) {
  const [a, b, c, d] = [x - size / 2, y - size / 2, x + size / 2, y + size / 2].map(round);
  const name = { own: "here", here: "here", coming: "coming", gone: "gone" }[value] || "missing";
  if (name === "gone") {
    return svg("circle", { class: "mark gone", cx: round(x), cy: round(y), r: Math.max(1, size / 6) });
  }
  const path = name === "coming" ? `M${a} ${b}L${c} ${round(y)}L${a} ${d}Z` : `M${a} ${b}H${c}V${d}H${a}Z`;
  return svg("path", { class: `mark ${name}`, d: path });
}

// A bar that fills with the blocks of the row (or column) that are done; ringed when the result has left.
function outputMark(data, found, kind, shard, far, middle, size, isAcross) {
  const own = placeOf(data, state.rank);
  const line = isAcross ? data.rows[own].map((row) => [row, shard]) : data.cols[own].map((col) => [shard, col]);
  const blocks = line.filter(([row, col]) => patternOf(data, row, col) !== "0");
  if (!blocks.length) return [];
  const share = blocks.filter(([row, col]) => found.done.has(`${row},${col}`)).length / blocks.length;
  const isAway = found.sent.has(`${kind}${shard}`) || found.sums.get(`${kind}${shard}`) === "finished";
  const length = 18;
  const bar = (name, part) =>
    isAcross
      ? svg("rect", { class: name, x: round(middle - size / 2), y: far, width: size, height: round(length * part) })
      : svg("rect", { class: name, x: far, y: round(middle - size / 2), width: round(length * part), height: size });
  return [bar("mark sum", 1), bar(`mark share${isAway ? " away" : ""}`, share)];
}

// Looking at one block

function drawLookedAt() {
  const frame = byId("looked-at");
  const data = pass();
  const room = matrixLayout(byId("matrix").clientWidth, data.rows.length);
  const size = state.block ? round(room.cell) : 0;
  const [row, col] = state.block || [0, 0];
  fill(frame, { x: round(room.x(col)), y: round(room.x(row)), width: size, height: size }, []);
  byId("block-words").textContent = state.block
    ? blockWords(data, row, col)
    : "Point at a block, or tap it, to see which rank computes it and what is sent.";
}

function blockAt(event) {
  const data = pass();
  const room = matrixLayout(byId("matrix").clientWidth, data.rows.length);
  const corner = byId("matrix").firstChild.getBoundingClientRect();
  const index_ = (pixels) => Math.floor((pixels - room.gutter) / room.cell);
  const [row, col] = [index_(event.clientY - corner.top), index_(event.clientX - corner.left)];
  return [row, col].every((index) => index >= 0 && index < data.rows.length) ? [row, col] : null;
}

function blockWords(data, row, col) {
  const pattern = patternOf(data, row, col);
  const name = `Block q${row} × kv${col}`;
  if (pattern === "0") return `${name}: fully masked, so no rank computes it.`;
  const place = ownerOf(data, row, col);
  const ranks = numbersText(members(data, place));
  const who = data.ulysses === 1 ? `rank ${place}` : `place ${place} (ranks ${ranks}, each for its heads)`;
  const kinds = state.direction === "forward" ? [`q${row}`, "o"] : [`q${row} and do${row}`, "dq"];
  const from = (shard) => (data.ulysses === 1 ? `rank ${shard}` : `place ${shard}`);
  const comes = [];
  if (row !== place) comes.push(`${kinds[0]} from ${from(row)}`);
  if (col !== place) comes.push(`kv${col} from ${from(col)}`);
  const goes = [];
  if (row !== place) goes.push(`a partial ${kinds[1]}${row} goes home to ${from(row)}`);
  if (col !== place && state.direction === "backward") goes.push(`a partial dkv${col} to ${from(col)}`);
  const travel = comes.length ? `It needs ${listText(comes)}` : "The rank already has everything it needs";
  const share = pattern === "1" ? "" : " It is partly masked.";
  return `${name}: computed by ${who}. ${travel}${goes.length ? `; ${listText(goes)}` : ""}.${share}`;
}

const members = (data, place) => Array.from({ length: data.ulysses }, (_, index) => place * data.ulysses + index);
