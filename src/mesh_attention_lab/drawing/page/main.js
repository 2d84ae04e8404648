// Controls, keys and resizing; redraws what has changed.

let playing = null;

function drawAll() {
  drawControls();
  drawLegends();
  drawMatrix();
  drawSteps();
  drawTimeline();
  drawStrip();
  drawCompare();
  drawGrowth();
  drawOverview();
  drawChoiceWords();
  updateStep();
}

function updateStep() {
  updateMatrix();
  updateSteps();
  updateTimeline();
  updateStrip();
  updateNowWords();
  updatePlayer();
  history.replaceState(null, "", stateHash());
}

function change(choose) {
  stop();
  choose();
  drawAll();
}

// Controls

function drawControls() {
  const { scene } = state;
  const { ranks, method, tile } = scene;
  chips("ranks", rankNumbers(), ranks, (wanted) => chooseScene(nearestScene({ ranks: Number(wanted), method, tile })));
  chips("method", methodsOf(ranks), method, (wanted) => chooseScene(nearestScene({ ranks, method: wanted, tile })));
  chips("tile", tilesOf(ranks, method), tile, (wanted) => chooseScene(nearestScene({ ranks, method, tile: wanted })));
  chips("pass", directions(scene), state.direction, chooseDirection);
  const options = Array.from({ length: scene.ranks }, (_, rank) => html("option", { value: rank }, `${rank}`));
  byId("rank").replaceChildren(...options);
  byId("rank").value = state.rank;
}

// Radio buttons that look like chips. They are made again only when the choice on offer changes, so focus stays.
function chips(name, values, chosen, choose) {
  const box = byId(`${name}-chips`);
  const offer = JSON.stringify(values);
  if (box.dataset.offer !== offer) {
    box.dataset.offer = offer;
    const chip = (value) =>
      html("label", { class: "chip" }, html("input", { type: "radio", name, value }), html("span", {}, `${value}`));
    box.replaceChildren(...values.map(chip));
  }
  box.onchange = (event) => change(() => choose(event.target.value));
  [...box.querySelectorAll("input")].forEach((input, index) => { input.checked = values[index] === chosen; });
}

function drawLegends() {
  const swatch = (name, words) => html("li", {}, html("span", { class: `swatch ${name}`, "aria-hidden": true }), words);
  const sums = state.direction === "forward" ? "sum of a row (right)" : "sums of rows and columns (right, below)";
  const matrix = {
    done: "done",
    now: "now",
    ready: "ready to compute",
    todo: "inputs missing",
    other: "other ranks’ tiles",
    here: "shard has arrived",
    coming: "on its way",
    missing: "not requested yet",
    gone: "freed",
    sum: `${sums}: share done; purple: sent home`,
  };
  const lanes = {
    compute: "computes",
    wait: "waits",
    send: "sends",
    recv: "receives",
    exposed: "exposed: the busiest rank does not compute",
    cursor: "current step",
  };
  const hasMeasured = rivals().some((scene) => Object.values(scene.passes).some((data) => data.measured));
  const bars = {
    forecast: "the busiest rank computes",
    exposed: "exposed: the busiest rank does not compute",
    ...(hasMeasured && { measured: "measured time" }),
  };
  const swatches = (words) => Object.entries(words).map(([name, text]) => swatch(`s-${name}`, text));
  byId("matrix-legend").replaceChildren(...swatches(matrix));
  byId("timeline-legend").replaceChildren(...swatches(lanes));
  byId("compare-legend").replaceChildren(...swatches(bars));
}

// Playing

function updatePlayer() {
  const steps = stepsNow().length;
  const slider = byId("slider");
  slider.max = steps;
  slider.value = state.step;
  const times = stepTimes(state.scene, state.direction, "forecast", state.rank);
  const now = times && (times[state.step] || times[times.length - 1]);
  const clock = now ? timeText(state.step < steps ? now.start : now.stop) : null;
  const where = state.step < steps ? `${state.step + 1} / ${steps}` : `end / ${steps}`;
  byId("where").textContent = clock === null ? where : `${where} · ${clock}`;
  const words = state.step < steps ? `step ${state.step + 1} of ${steps}: ${stepsNow()[state.step].text}` : "the end";
  slider.setAttribute("aria-valuetext", words);
  // Not `disabled`: a disabled button would keep keys from the page.
  const isOver = { first: state.step === 0, prev: state.step === 0, next: state.step === steps };
  for (const id of Object.keys(isOver)) byId(id).setAttribute("aria-disabled", isOver[id]);
  byId("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  byId("play-shape").setAttribute("d", playing ? "M4 3h3v10H4zM9 3h3v10H9z" : "M4 2.5v11L13 8z");
}

function step(by) {
  chooseStep(state.step + by);
  updateStep();
}

function stop() {
  clearInterval(playing);
  playing = null;
}

// The whole program in about half a minute, if it is long.
function play() {
  if (playing) {
    stop();
    updatePlayer();
    return;
  }
  if (state.step === stepsNow().length) chooseStep(0);
  const pause = Math.max(120, Math.min(700, 30000 / stepsNow().length));
  playing = setInterval(() => {
    if (state.step === stepsNow().length) stop();
    else step(1);
    updatePlayer();
  }, pause);
  updateStep();
}

// Pointing and keys

function listen() {
  const on = (id, kind, act) => byId(id).addEventListener(kind, act);
  on("controls", "submit", (event) => event.preventDefault());
  on("rank", "change", (event) => change(() => chooseRank(Number(event.target.value))));
  on("first", "click", () => { stop(); step(-Infinity); });
  on("prev", "click", () => { stop(); step(-1); });
  on("next", "click", () => { stop(); step(1); });
  on("play", "click", play);
  on("slider", "input", (event) => { stop(); chooseStep(Number(event.target.value)); updateStep(); });
  on("steps", "click", (event) => {
    const item = event.target.closest("[data-step]");
    if (event.target.closest(".fold")) unfold(item);
    else jump(item);
  });
  on("steps", "scroll", cueSteps);
  on("timeline", "click", clickTimeline);
  on("timeline", "pointerover", (event) => showSpan(event.target));
  on("overview", "click", (event) => {
    const row = event.target.closest("[data-rank]");
    if (row) change(() => chooseRank(Number(row.dataset.rank)));
  });
  on("compare", "click", (event) => {
    const row = event.target.closest("[data-scene]");
    if (row) change(() => chooseScene(DATA.scenes[Number(row.dataset.scene)]));
  });
  on("matrix", "pointermove", (event) => lookAt(blockAt(event)));
  on("matrix", "pointerleave", () => lookAt(null));
  on("matrix", "click", (event) => { lookAt(blockAt(event)); chooseOwner(); });
  on("matrix", "keydown", matrixKey);
  on("theme", "click", switchTheme);
  document.addEventListener("keydown", pageKey);
  window.addEventListener("hashchange", () => {
    if (location.hash !== stateHash()) change(() => readHash(location.hash));
  });
}

function jump(target) {
  if (!target || target.dataset.step === "") return;
  stop();
  chooseStep(Number(target.dataset.step));
  updateStep();
}

function clickTimeline(event) {
  const row = event.target.closest("[data-direction]");
  if (row) change(() => chooseDirection(row.dataset.direction));
  else {
    showSpan(event.target);
    jump(event.target.closest("[data-step]"));
  }
}

function showSpan(target) {
  const hint = byId("timeline").querySelector(".span") && "Point at a span to see what it is; click to go to its step.";
  byId("span-words").textContent = (target && target.dataset.words) || hint || "";
}

function lookAt(block) {
  state.block = block;
  drawLookedAt();
}

// With Ulysses, a place is several ranks; choose the one with the same heads.
function chooseOwner() {
  if (!state.block || patternOf(pass(), ...state.block) === "0") return;
  const data = pass();
  const rank = ownerOf(data, ...state.block) * data.ulysses + (state.rank % data.ulysses);
  const { block } = state;
  if (rank !== state.rank) change(() => chooseRank(rank));
  lookAt(block);
}

function matrixKey(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const own = placeOf(pass(), state.rank);
  if (event.shiftKey && event.key in moves) {
    const last = pass().rows.length - 1;
    const from = state.block || [own, own];
    lookAt(state.block ? from.map((index, axis) => Math.max(0, Math.min(last, index + moves[event.key][axis]))) : from);
  } else if (event.key === "Enter") chooseOwner();
  else if (event.key === "Escape") lookAt(null);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

// Left and right step everywhere; what else a control does with keys, it keeps.
function pageKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const isIn = (selector) => event.target.closest(selector);
  const acts = { ArrowRight: 1, ArrowLeft: -1 };
  if (!isIn("#controls")) Object.assign(acts, { Home: -Infinity, End: Infinity });
  if (isIn("#steps")) Object.assign(acts, { ArrowDown: 1, ArrowUp: -1 });
  if (event.key in acts) {
    stop();
    step(acts[event.key]);
  } else if (event.key === " " && !isIn("button, a, #controls")) {
    play();
  } else if (event.key === "Enter" && isIn("#steps")) {
    unfold(byId(`step-${state.step}`));
  } else return;
  event.preventDefault();
}

// Light and dark

// As the system has it, until the button is pressed.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => document.documentElement.dataset.theme === "dark";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme-text").textContent = isDark() ? "Light" : "Dark";
}

function followSystem() {
  setTheme(systemIsDark.matches ? "dark" : "light");
}

function switchTheme() {
  systemIsDark.removeEventListener("change", followSystem);
  setTheme(isDark() ? "light" : "dark");
}

function redrawWhenResized() {
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    drawAll();
  }).observe(document.documentElement);
}

readHash(location.hash);
if (!(state.direction in state.scene.passes)) [state.direction] = directions(state.scene);
listen();
followSystem();
systemIsDark.addEventListener("change", followSystem);
drawAll();
redrawWhenResized();
