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
  updateSteps();
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
    return;
  }
  current.setAttribute("aria-selected", "true");
  box.setAttribute("aria-activedescendant", current.id);
  // Only the list scrolls, never the page.
  box.scrollTop = current.offsetTop - box.clientHeight / 2 + current.offsetHeight / 2;
}
