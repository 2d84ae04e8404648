// One rank's program as a list, with the current step marked.

const LANE_OF = { recv: "recv", send: "send", attend: "compute", gather: "recv", reduce: "send", exchange: "recv" };

function drawSteps() {
  const steps = stepsNow();
  byId("steps-title").textContent = `The program of rank ${state.rank}`;
  const list = steps.map((step, index) =>
    html(
      "li",
      { role: "option", id: `step-${index}`, "data-step": index, class: `verb-${LANE_OF[step.verb] || "other"}` },
      html("span", { class: "index", "aria-hidden": true }, `${index + 1}`),
      html("code", {}, ...stepParts(step)),
    ),
  );
  byId("steps").replaceChildren(...list);
  foldLong(list, steps);
  updateSteps();
}

const FOLDED_ABOVE = 100; // pixels: five lines

// A long step shows its first lines and says what is in it; a click on that, or Enter, unfolds it.
function foldLong(items, steps) {
  const isLong = items.map((item) => item.lastChild.clientHeight > FOLDED_ABOVE);
  items.forEach((item, index) => {
    if (!isLong[index]) return;
    item.classList.add("folded");
    item.append(html("button", { class: "fold", type: "button", tabindex: -1 }, foldWords(steps[index])));
  });
}

function foldWords({ rows, cols, sends, recvs }) {
  if (rows.length) return `all of ${rows.length} × ${cols.length} blocks`;
  return `all of ${count(sends.length, "send")} and ${count(recvs.length, "receive")}`;
}

function unfold(item) {
  if (item && item.querySelector(".fold")) item.classList.toggle("folded");
  cueSteps();
}

// The list fades where it goes on.
function cueSteps() {
  const box = byId("steps");
  box.classList.toggle("more-above", box.scrollTop > 1);
  box.classList.toggle("more-below", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
}

// The verb by itself, so that it can be set off; the text is the plan's, letter for letter.
function stepParts(step) {
  return [html("b", {}, step.verb), step.text.slice(step.verb.length)];
}

function updateSteps() {
  const box = byId("steps");
  for (const item of box.querySelectorAll("[aria-selected=true]")) item.setAttribute("aria-selected", "false");
  const steps = stepsNow();
  box.classList.toggle("finished", state.step === steps.length);
  [...box.children].forEach((item, index) => item.classList.toggle("past", index < state.step));
  byId("steps-note").textContent = `${count(steps.length, "step")}; ${
    state.step === steps.length ? "all are done." : `step ${state.step + 1} is next.`
  }`;
  const current = box.children[state.step];
  if (!current) {
    box.removeAttribute("aria-activedescendant");
    box.scrollTop = box.scrollHeight;
    cueSteps();
    return;
  }
  current.setAttribute("aria-selected", "true");
  box.setAttribute("aria-activedescendant", current.id);
  // Only the list scrolls, never the page.
  box.scrollTop = current.offsetTop - Math.max(0, box.clientHeight - current.offsetHeight) / 2;
  cueSteps();
}
