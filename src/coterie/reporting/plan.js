"use strict";
(() => {
  const names = Object.keys(PLAN.values), width = PLAN.columns.length;
  const shown = (x) => (x === null ? "–" : String(x));
  const row = () => names.reduce((at, name) => at * PLAN.values[name].length + Number(document.getElementById(name).value), 0);
  function text(parent, tag, content) {
    const made = document.createElement(tag);
    made.textContent = content;
    parent.append(made);
    return made;
  }
  function show() {
    for (const name of names) {
      const value = PLAN.values[name][Number(document.getElementById(name).value)];
      document.getElementById("of-" + name).value = Number(value.toPrecision(4)).toString();
    }
    const found = PLAN.rows[row()], table = document.getElementById("plan"), bars = document.getElementById("speedups");
    const speedup = PLAN.methods.map((_, i) => found[i * width + width - 1]);
    const most = Math.max(...speedup.map((x) => (x === null ? 1 : x)));
    while (table.rows.length > 1) table.deleteRow(1);
    bars.replaceChildren();
    PLAN.methods.forEach((method, i) => {
      const cells = table.insertRow();
      text(cells, "td", method);
      for (let k = 0; k < width; k++) text(cells, "td", shown(found[i * width + k]));
      const bar = text(bars, "div", "");
      bar.className = "bar";
      bar.setAttribute("role", "listitem");
      text(bar, "span", method).className = "name";
      const track = text(bar, "span", "");
      track.className = "track";
      text(track, "i", "").style.width = (100 * (speedup[i] === null ? most : speedup[i])) / most + "%";
      text(bar, "span", speedup[i] === null ? "no bound" : "×" + Number(speedup[i].toPrecision(3))).className = "number";
    });
    const wga = speedup[PLAN.methods.indexOf("WGA")], at = PLAN.columns.indexOf("bound");
    const bounds = ["Alone", "WGA"].map((method) => found[PLAN.methods.indexOf(method) * width + at]);
    const nothing = bounds.every((bound) => bound === null || bound > PLAN.something);
    document.getElementById("said").textContent =
      wga > 1.05
        ? "By its bound, averaging needs " + wga + " times fewer steps here than training alone."
        : nothing
        ? "The bound says nothing here: it promises neither averaging nor training alone a loss below the start's."
        : "By its bound, averaging does not pay here: the peers' bias outweighs the noise they would save.";
  }
  for (const name of names) document.getElementById(name).addEventListener("input", show);
  show();
})();
