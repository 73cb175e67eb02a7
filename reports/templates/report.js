"use strict";
// Add a table of all records, filters, and one tab stop for each matrix. Text never becomes markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const STEP = 50;
  const createElement = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  // The records; `_serialize_row` in reports/record_table.py writes the places of a row.
  const rows = data.rows.map((row) => {
    const [caseId, features] = data.cases[row[4]];
    const share = row[5] === undefined ? null : row[5];
    return {
      contender: row[0], check: row[1], observable: row[2], verdict: row[3], caseId, features, share,
      finding: row[6] || 0, texts: (row[7] || []).map((number) => data.texts[number]), command: row[8] || 0,
    };
  });
  const rankShare = (row) =>
    row.share === null ? -1 : typeof row.share === "string" ? Infinity : row.share;
  const shareText = (share) =>
    share === null ? "–" : share === "inf" ? "∞×" : share === "nan" ? "NaN×" : `${share}×`;
  const commandOf = (row) => {
    if (row.command === 1)
      return `python -m conformance run --impl=${data.contenders[row.contender][1]} --case=${row.caseId} --check=${data.checks[row.check]}`;
    return row.command ? data.texts[row.command] : "";
  };
  const words = (row) => {
    if (row.words === undefined)
      row.words = [row.caseId, data.contenders[row.contender][0], data.checks[row.check], data.observables[row.observable],
        data.verdicts[row.verdict][0], ...row.texts].join("\n").toLowerCase();
    return row.words;
  };
  const names = {
    verdict: (row) => row.verdict, contender: (row) => data.contenders[row.contender][0],
    check: (row) => row.check, observable: (row) => row.observable, caseId: (row) => row.caseId,
  };

  const form = byId("filters");
  const table = byId("rows");
  const matchCount = byId("match-count");
  const order = { by: "", down: true };
  let only = null; // the one case whose records are shown, if an address names it
  let found = rows;
  let shown = 0;

  const fill = (name, any, entries) => {
    const select = form.elements[name];
    select.replaceChildren(new Option(any, ""), ...entries.map(([value, text]) => new Option(text, value)));
  };
  fill("verdict", "any", [["red", "red"], ...data.verdicts.map(([name, glyph], i) => [i, `${glyph} ${name}`])]);
  fill("contender", "any", data.contenders.map(([label], i) => [i, label]));
  fill("check", "any", data.checks.map((name, i) => [i, name]));
  fill("observable", "any", data.observables.map((name, i) => [i, name]));
  fill("feature", "any", data.features.map((name, i) => [i, name]));
  const findings = [...new Set(rows.map((row) => row.finding))].filter(Boolean).sort((a, b) => a - b);
  fill("finding", "any", findings.map((number) => [number, `${number}`]));
  const numbered = new Set(["contender", "check", "observable", "finding"]);

  const chosen = () => {
    const wanted = {};
    for (const name of ["verdict", "contender", "check", "observable", "feature", "finding"])
      wanted[name] = form.elements[name].value;
    wanted.text = form.elements.text.value.trim().toLowerCase();
    return wanted;
  };
  const fits = (row, wanted) => {
    if (only !== null && row.caseId !== only) return false;
    for (const name of numbered) if (wanted[name] !== "" && row[name] !== Number(wanted[name])) return false;
    if (wanted.verdict === "red" ? !data.red.includes(row.verdict) : wanted.verdict !== "" && row.verdict !== Number(wanted.verdict))
      return false;
    if (wanted.feature !== "" && !row.features.includes(Number(wanted.feature))) return false;
    return wanted.text === "" || words(row).includes(wanted.text);
  };

  const line = (row) => {
    const tr = createElement("tr");
    const [name, glyph] = data.verdicts[row.verdict];
    const red = data.red.includes(row.verdict);
    tr.append(createElement("td", `${glyph} ${name}`, red ? "ink-fail" : ""));
    const cell = createElement("td");
    const details = createElement("details");
    const summary = createElement("summary", row.caseId, "id");
    summary.tabIndex = -1;
    details.append(summary);
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      for (const text of row.texts) details.append(createElement("div", text, "reason"));
      const command = commandOf(row);
      if (command) details.append(createElement("code", command, "run"));
      const link = createElement("a", "all records of this case");
      link.href = `#case-${encodeURI(row.caseId)}`;
      details.append(link);
    });
    cell.append(details);
    tr.append(cell, createElement("td", shareText(row.share), rankShare(row) > 1 && red ? "num ink-fail" : "num"));
    tr.append(createElement("td", data.checks[row.check]), createElement("td", data.observables[row.observable]));
    tr.append(createElement("td", data.contenders[row.contender][0]));
    return tr;
  };
  const extend = () => {
    const next = found.slice(shown, shown + STEP);
    table.tBodies[0].append(...next.map(line));
    const first = table.querySelector("summary");
    if (first && shown === 0) first.tabIndex = 0;
    shown += next.length;
    const left = found.length - shown;
    byId("further").hidden = left === 0;
    byId("further").textContent = `Show ${Math.min(STEP, left)} more of ${left.toLocaleString("en")}`;
    cues();
  };
  const draw = () => {
    const wanted = chosen();
    found = rows.filter((row) => fits(row, wanted));
    if (order.by) {
      const key = order.by === "share" ? rankShare : names[order.by];
      const sign = order.down ? -1 : 1;
      found.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    }
    shown = 0;
    table.tBodies[0].replaceChildren();
    extend();
    const count = (n) => `${n.toLocaleString("en")} record${n === 1 ? "" : "s"}`;
    let text = `${count(found.length)}${only === null ? "" : ` of case ${only}`}`;
    if (rows.length < data.total)
      text += `; this page holds ${rows.length.toLocaleString("en")} of ${data.total.toLocaleString("en")}: what did not pass first, and of what passed what is closest to its limit`;
    matchCount.textContent = text;
    byId("query").textContent = query(wanted);
  };
  // The same filters as a command on the JSON lines, which have every record.
  const query = (wanted) => {
    const quoted = JSON.stringify;
    const parts = ['(.schema|startswith("attention-conformance/record/"))'];
    if (only !== null) parts.push(`.case==${quoted(only)}`);
    let [file, runs] = [data.file, ""];
    if (wanted.contender !== "") {
      const [, implementation, platform, theirs, marks] = data.contenders[Number(wanted.contender)];
      parts.push(`.implementation==${quoted(implementation)}`, `.platform==${quoted(platform)}`);
      [file, runs] = [theirs, marks]; // files, then run ids, distinguish merged runs of one kernel
    }
    if (wanted.check !== "") parts.push(`.check==${quoted(data.checks[Number(wanted.check)])}`);
    if (wanted.observable !== "") parts.push(`.observable==${quoted(data.observables[Number(wanted.observable)])}`);
    if (wanted.verdict === "red") parts.push(`(.verdict|IN(${data.red.map((i) => quoted(data.verdicts[i][0])).join(",")}))`);
    else if (wanted.verdict !== "") parts.push(`.verdict==${quoted(data.verdicts[Number(wanted.verdict)][0])}`);
    if (wanted.feature !== "") parts.push(`(.features|index(${quoted(data.features[Number(wanted.feature)])}))`);
    const condition = `select(${parts.join(" and ")})`;
    const program = runs ? data.of_runs.replace("%s", () => runs).replace("%s", () => condition) : condition;
    return `jq ${runs ? "-cn" : "-c"} '${program.replaceAll("'", "'\\''")}' ${file}`;
  };

  // Filter by the address of a cell, of a finding's records, or of a case.
  const clear = () => {
    form.reset();
    only = null;
  };
  const go = () => {
    const hash = decodeURIComponent(location.hash.slice(1));
    const cell = /^records-(\d+)-(feature|check)-(\d+)$/.exec(hash);
    const finding = /^records-finding-(\d+)$/.exec(hash);
    if (!cell && !finding && !hash.startsWith("case-")) return;
    clear();
    if (cell) {
      form.elements.contender.value = cell[1];
      form.elements[cell[2]].value = cell[3];
    } else if (finding) form.elements.finding.value = finding[1];
    else only = hash.slice("case-".length);
    draw();
    byId("records").scrollIntoView();
    matchCount.focus({ preventScroll: true });
  };
  addEventListener("hashchange", go);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link && decodeURIComponent(link.hash) === decodeURIComponent(location.hash)) go(); // no hashchange event comes for the same address
  });

  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  form.addEventListener("reset", () => {
    only = null;
    setTimeout(draw);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("further").addEventListener("click", extend);
  for (const button of table.tHead.querySelectorAll("button"))
    button.addEventListener("click", () => {
      order.down = order.by === button.dataset.by ? !order.down : button.dataset.by === "share";
      order.by = button.dataset.by;
      for (const th of table.tHead.querySelectorAll("th")) th.removeAttribute("aria-sort");
      button.parentElement.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      draw();
    });

  const find = byId("find");
  if (find) {
    const sections = [...document.querySelectorAll(".finding")].map((section) => [section, section.textContent.toLowerCase()]);
    const narrow = () => {
      const text = find.elements.text.value.trim().toLowerCase();
      let left = 0;
      for (const [section, content] of sections) {
        section.hidden = !content.includes(text);
        left += section.hidden ? 0 : 1;
      }
      find.querySelector("[role=status]").textContent = text ? `${left} of ${sections.length}` : "";
    };
    find.addEventListener("input", narrow);
    find.addEventListener("submit", (event) => event.preventDefault());
  }

  // Make the links of a table one tab stop, and the buttons that sort its columns another; arrow keys move within.
  const rove = (inside, stops, heads = []) => {
    const every = stops.join();
    const lines = () => [heads, ...[...inside.tBodies[0].rows].map((row) => [...row.cells])];
    const there = (cell) => cell && cell.querySelector(every);
    const step = (link, key) => {
      const grid = lines();
      const row = grid.findIndex((cells) => cells.includes(link.closest("th, td")));
      const column = grid[row].indexOf(link.closest("th, td"));
      const across = { ArrowRight: grid[row].slice(column + 1), ArrowLeft: grid[row].slice(0, column).reverse() };
      const along = { ArrowDown: grid.slice(row + 1), ArrowUp: grid.slice(0, row).reverse() };
      if (key in across) return across[key].map(there).find(Boolean);
      if (key in along) return along[key].map((cells) => there(cells[column])).find(Boolean);
      const all = grid[row].map(there).filter(Boolean);
      return key === "Home" ? all[0] : key === "End" ? all[all.length - 1] : null;
    };
    inside.addEventListener("keydown", (event) => {
      const link = event.target.closest(every);
      const next = link && step(link, event.key);
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
    inside.addEventListener("focusin", (event) => {
      const link = event.target.closest(every);
      if (!link) return;
      for (const other of inside.querySelectorAll(stops.find((one) => link.matches(one)))) other.tabIndex = -1;
      link.tabIndex = 0;
    });
    for (const one of stops) {
      const first = inside.querySelector(one);
      if (first) first.tabIndex = 0;
    }
  };
  // Sort a matrix by a column, worst first as its cells are ranked, or by the names of implementations.
  const sortable = (matrix) => {
    const [above, below] = [...matrix.tHead.rows].map((row) => [...row.cells]);
    const heads = [above[0], ...below];
    const rank = (row, column) => row.cells[column].dataset.rank ?? Infinity; // a cell without records comes last in both orders
    heads.forEach((th, column) => {
      const button = createElement("button", th.textContent);
      button.type = "button";
      button.tabIndex = -1;
      button.title = column ? "sort: worst first, then the other way" : "sort by name";
      th.replaceChildren(button);
      button.addEventListener("click", () => {
        const first = column ? "descending" : "ascending";
        const now = th.getAttribute("aria-sort") !== first ? first : column ? "ascending" : "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        th.setAttribute("aria-sort", now);
        const sign = now === first ? 1 : -1;
        const named = (one, other) => (one.cells[0].textContent < other.cells[0].textContent ? -1 : 1);
        const by = (one, other) => {
          const [a, b] = [rank(one, column), rank(other, column)];
          if (a === b) return named(one, other);
          return a === Infinity ? 1 : b === Infinity ? -1 : sign * (a - b);
        };
        const rows = [...matrix.tBodies[0].rows];
        matrix.tBodies[0].append(...rows.sort(column ? by : (one, other) => sign * named(one, other)));
      });
    });
    return heads;
  };
  for (const matrix of document.querySelectorAll("table.sortable")) rove(matrix, ["a.cell", "thead button"], sortable(matrix));
  rove(table, ["summary"]);

  // Make a region a tab stop only if it scrolls and nothing in it is one, and show that there is more to the right.
  const regions = [...document.querySelectorAll(".scroll")];
  for (const region of regions) {
    const cue = createElement("p", "more to the right →", "cue");
    cue.setAttribute("aria-hidden", "true");
    cue.hidden = true;
    region.before(cue);
  }
  const cue = (region) => {
    const wider = region.scrollWidth > region.clientWidth + 1;
    const more = wider && region.scrollLeft + region.clientWidth < region.scrollWidth - 2;
    region.previousElementSibling.hidden = !more;
    region.classList.toggle("more", more);
    if (wider && !region.querySelector("a.cell, summary")) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
  };
  const cues = () => regions.filter((region) => region.clientWidth).forEach(cue);
  for (const region of regions) region.addEventListener("scroll", () => cue(region), { passive: true });
  addEventListener("resize", cues);
  document.addEventListener("toggle", cues, true);

  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  byId("few").hidden = true;
  draw();
  cues();
  go();
})();
