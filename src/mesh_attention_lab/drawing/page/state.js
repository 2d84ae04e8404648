// The state of the page. Only scenes that exist can be chosen; the address keeps the state.

// Data from compressed JSON in base64.
async function unpacked(text) {
  const bytes = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
  return new Response(bytes.stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

const DATA = await unpacked(byId("data").textContent);
const state = { scene: DATA.scenes[0], direction: "forward", rank: 0, step: 0, block: null };

const pass = () => state.scene.passes[state.direction];
const directions = (scene) => ["forward", "backward"].filter((direction) => direction in scene.passes);
const distinct = (values) => [...new Set(values)];
const rankNumbers = () => distinct(DATA.scenes.map((scene) => scene.ranks)).sort((a, b) => a - b);
const scenesOf = (ranks) => DATA.scenes.filter((scene) => scene.ranks === ranks);
const methodsOf = (ranks) => distinct(scenesOf(ranks).map((scene) => scene.method));
const tilesOf = (ranks, method) => scenesOf(ranks).filter((one) => one.method === method).map((one) => one.tile);
const rivals = () => DATA.scenes.filter((scene) => scene.problem === state.scene.problem);

// The scene with these ranks that is nearest to what was chosen before: same method, then same tile.
function nearestScene({ ranks, method, tile }) {
  const near = (scene) => (scene.method === method ? 2 : 0) + (scene.tile === tile ? 1 : 0);
  return scenesOf(ranks).reduce((best, scene) => (near(scene) > near(best) ? scene : best));
}

function chooseScene(scene) {
  if (scene === state.scene) return;
  const wasAtEnd = state.step > 0 && state.step === stepsNow().length;
  Object.assign(state, { scene, block: null, rank: Math.min(state.rank, scene.ranks - 1) });
  if (!(state.direction in scene.passes)) state.direction = directions(scene)[0];
  state.step = wasAtEnd ? stepsNow().length : Math.min(state.step, stepsNow().length);
}

function chooseDirection(direction) {
  if (direction === state.direction) return;
  Object.assign(state, { direction, step: 0, block: null });
}

function chooseRank(rank) {
  state.rank = Math.max(0, Math.min(state.scene.ranks - 1, rank));
  state.step = Math.min(state.step, stepsNow().length);
}

function chooseStep(step) {
  state.step = Math.max(0, Math.min(stepsNow().length, step));
}

function stateHash() {
  const { scene, direction, rank, step } = state;
  const values = { ranks: scene.ranks, method: scene.method, tile: scene.tile, pass: direction, rank, step };
  return `#${new URLSearchParams(Object.entries(values))}`;
}

// What the address leaves out is not changed; what it gets wrong is set to the nearest valid value.
function readHash(hash) {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  const ranks = Number(values.get("ranks"));
  if (!rankNumbers().includes(ranks)) return;
  chooseScene(nearestScene({ ranks, method: values.get("method"), tile: values.get("tile") }));
  if (directions(state.scene).includes(values.get("pass"))) chooseDirection(values.get("pass"));
  chooseRank(Math.trunc(Number(values.get("rank"))) || 0);
  chooseStep(Math.trunc(Number(values.get("step"))) || 0);
}
