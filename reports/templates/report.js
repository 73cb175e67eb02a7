"use strict";
// Add a table of all records, filters that live in the address, tooltips, and one tab stop for each matrix.
// Text never becomes markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const STEP = 25;
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
      implementation: row[0], check: row[1], observable: row[2], verdict: row[3], caseId, features, share,
      finding: row[6] || 0, texts: (row[7] || []).map((number) => data.texts[number]), command: row[8] || 0,
    };
  });
  const rankShare = (row) =>
    row.share === null ? -1 : typeof row.share === "string" ? Infinity : row.share;
  // As `format_share` in reports/text_format.py writes it. The figures come rounded.
  const shareText = (share) => {
    if (share === null) return "–";
    if (typeof share === "string") return share === "inf" ? "∞" : "NaN";
    const large = () => share.toExponential(3).replace(/\.?0*e\+?/, "e");
    return `${share < 1e6 ? share : large()}×`;
  };
  const commandOf = (row) => {
    if (row.command === 1)
      return `python -m conformance run --impl=${data.implementations[row.implementation][1]} --case=${row.caseId} --check=${data.checks[row.check]}`;
    return row.command ? data.texts[row.command] : "";
  };
  const words = (row) => {
    if (row.words === undefined)
      row.words = [row.caseId, data.implementations[row.implementation][0], data.checks[row.check], data.observables[row.observable],
        data.verdicts[row.verdict][0], ...row.texts].join("\n").toLowerCase();
    return row.words;
  };
  // Let long text break after a slash, and not after the hyphens of an option. The text itself stays the same.
  const breakWell = (element) => {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const parts = text.data.split(/(--[\w-]+=?|\/)/);
      if (parts.length === 1) continue;
      const nodes = parts.flatMap((part) =>
        part === "/" ? [part, createElement("wbr")] : part.startsWith("--") ? [createElement("span", part, "option")] : [part]);
      text.replaceWith(...nodes);
    }
    return element;
  };
  // Without the folders of a file, unless two labels would be the same.
  const stripFolders = ([label]) => label.replace(/^.*\//, "");
  const stripped = data.implementations.map(stripFolders);
  const shortLabels = data.implementations.map((one, i) => (stripped.filter((other) => other === stripped[i]).length > 1 ? one[0] : stripped[i]));
  const names = {
    verdict: (row) => row.verdict, implementation: (row) => data.implementations[row.implementation][0],
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
  fill("implementation", "any", data.implementations.map(([label], i) => [i, label]));
  fill("check", "any", data.check_names.map((name, i) => [i, name]));
  fill("observable", "any", data.observables.map((name, i) => [i, name]));
  fill("feature", "any", data.features.map((name, i) => [i, name]));
  const findings = [...new Set(rows.map((row) => row.finding))].filter(Boolean).sort((a, b) => a - b);
  fill("finding", "any", findings.map((number) => [number, `${number}`]));
  const numbered = new Set(["implementation", "check", "observable", "finding"]);

  const chosen = () => {
    const wanted = {};
    for (const name of ["verdict", "implementation", "check", "observable", "feature", "finding"])
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
    const summary = breakWell(createElement("summary", row.caseId, "id"));
    summary.tabIndex = -1;
    details.append(summary);
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      for (const text of row.texts) details.append(createElement("div", text, "reason"));
      const command = commandOf(row);
      if (command) details.append(breakWell(createElement("code", command, "run")));
      const link = createElement("a", "all records of this case");
      link.href = `#case-${encodeURI(row.caseId)}`;
      details.append(link);
    });
    cell.append(details);
    tr.append(cell, createElement("td", shareText(row.share), rankShare(row) > 1 && red ? "num ink-fail" : "num"));
    tr.append(createElement("td", data.check_names[row.check]), createElement("td", data.observables[row.observable]));
    const implementation = createElement("td", shortLabels[row.implementation]);
    implementation.title = data.implementations[row.implementation][0];
    tr.append(implementation);
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
    if (wanted.implementation !== "") {
      const [, implementation, platform, theirs, marks] = data.implementations[Number(wanted.implementation)];
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

  // The filters live in the address: `#records?verdict=red&check=forward`. So a link restores the view, and the
  // browser's back button undoes a filter. Names stand for numbers, so that a link survives a new run.
  const find = byId("find");
  const nameOf = {
    verdict: (value) => (value === "red" ? value : data.verdicts[value][0]), implementation: (value) => data.implementations[value][0],
    check: (value) => data.checks[value], observable: (value) => data.observables[value],
    feature: (value) => data.features[value], finding: (value) => value,
  };
  const parameters = { verdict: "verdict", implementation: "implementation", check: "check", observable: "result", feature: "feature", finding: "finding" };
  const stateText = () => {
    const state = new URLSearchParams();
    for (const [name, parameter] of Object.entries(parameters))
      if (form.elements[name].value !== "") state.set(parameter, nameOf[name](form.elements[name].value));
    if (form.elements.text.value.trim()) state.set("text", form.elements.text.value.trim());
    if (only !== null) state.set("case", only);
    if (order.by) state.set("sort", `${order.by}${order.down ? "-down" : "-up"}`);
    if (find && find.elements.text.value.trim()) state.set("find", find.elements.text.value.trim());
    return state.toString();
  };
  // A choice is a step that the back button undoes; a letter that is typed is none.
  const writeState = (anchor, isStep) => {
    const state = stateText();
    const hash = state ? `#${anchor}?${state}` : `#${anchor}`;
    if (hash === location.hash) return;
    if (isStep) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
  };
  const readState = (text) => {
    const state = new URLSearchParams(text);
    for (const [name, parameter] of Object.entries(parameters)) {
      const wanted = state.get(parameter);
      const option = [...form.elements[name].options].find((one) => one.value !== "" && nameOf[name](one.value) === wanted);
      form.elements[name].value = option ? option.value : "";
    }
    form.elements.text.value = state.get("text") ?? "";
    only = state.get("case");
    const [, by, direction] = /^(\w+)-(down|up)$/.exec(state.get("sort") ?? "") ?? [];
    sortBy(heads().some((button) => button.dataset.by === by) ? by : "", direction === "down");
    if (find) {
      find.elements.text.value = state.get("find") ?? "";
      narrow();
    }
  };
  const heads = () => [...table.tHead.querySelectorAll("button")];
  const sortBy = (by, down) => {
    Object.assign(order, { by, down });
    for (const button of heads()) {
      button.parentElement.removeAttribute("aria-sort");
      if (button.dataset.by === by) button.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
    }
  };

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
  if (find) {
    find.addEventListener("input", () => {
      narrow();
      writeState("findings", false);
    });
    find.addEventListener("submit", (event) => event.preventDefault());
  }

  // Follow the address: to a view, to the records of a cell, of a finding or of a case, or into a folded section.
  const clear = () => {
    for (const element of form.elements) if (element.name) element.value = "";
    only = null;
  };
  const decode = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // an address that someone cut short
    }
  };
  const open = (element) => {
    for (let fold = element && element.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  };
  const go = () => {
    const view = /^#(records|findings)\?(.*)$/.exec(location.hash);
    const hash = decode(location.hash.slice(1));
    const cell = /^records-(\d+)-(feature|check)-(\d+)$/.exec(hash);
    const finding = /^records-finding-(\d+)$/.exec(hash);
    if (view || hash === "" || hash === "records" || hash === "findings") {
      readState(view ? view[2] : "");
      draw();
      if (hash) byId(view ? view[1] : hash).scrollIntoView();
      return;
    }
    if (!cell && !finding && !hash.startsWith("case-")) {
      const element = byId(hash);
      open(element);
      if (element) element.scrollIntoView();
      return;
    }
    clear();
    if (cell) {
      form.elements.implementation.value = cell[1];
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
    if (link && decode(link.hash) === decode(location.hash)) go(); // no hashchange event comes for the same address
  });

  let waiting = 0;
  form.addEventListener("input", (event) => {
    const isStep = event.target.name !== "text";
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      draw();
      writeState("records", isStep);
    }, 120);
  });
  form.addEventListener("reset", () => {
    only = null;
    setTimeout(() => {
      draw();
      writeState("records", true);
    });
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("further").addEventListener("click", extend);
  for (const button of heads())
    button.addEventListener("click", () => {
      sortBy(button.dataset.by, order.by === button.dataset.by ? !order.down : button.dataset.by === "share");
      draw();
      writeState("records", true);
    });

  // Make the links of a table one tab stop, and the buttons that sort its columns another; arrow keys move within.
  const rove = (inside, stops, heads = []) => {
    const every = stops.join();
    const lines = () => [heads, ...[...inside.tBodies].flatMap((body) => [...body.rows]).map((row) => [...row.cells])];
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
  // Sort a matrix by the results of an implementation, worst first, or put its rows back in their order.
  const sortable = (matrix) => {
    const headings = [...matrix.tHead.rows[0].cells];
    const groups = [...matrix.tBodies].map((body) => [body, [...body.rows]]);
    const rows = groups.flatMap(([, inside]) => inside.slice(1));
    const sorted = document.createElement("tbody");
    const rank = (row, column) => row.cells[column].dataset.rank ?? Infinity; // a cell without records comes last in both orders
    headings.forEach((th, column) => {
      const button = createElement("button", th.textContent);
      if (column) button.replaceChildren(...th.childNodes);
      button.type = "button";
      button.tabIndex = -1;
      button.title = column ? "sort: worst first, then the other way" : "put the rows back in their order";
      th.replaceChildren(button);
      button.addEventListener("click", () => {
        const now = th.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
        for (const other of headings) other.removeAttribute("aria-sort");
        if (!column) {
          sorted.remove();
          for (const [body, inside] of groups) body.append(...inside);
          matrix.append(...groups.map(([body]) => body));
          return;
        }
        th.setAttribute("aria-sort", now);
        const sign = now === "descending" ? 1 : -1;
        const by = (one, other) => {
          const [a, b] = [rank(one, column), rank(other, column)];
          if (a === b) return rows.indexOf(one) - rows.indexOf(other);
          return a === Infinity ? 1 : b === Infinity ? -1 : sign * (a - b);
        };
        sorted.append(...[...rows].sort(by));
        for (const [body] of groups) body.remove();
        matrix.append(sorted);
      });
    });
    return headings;
  };
  for (const matrix of document.querySelectorAll("table.sortable")) {
    const headings = sortable(matrix);
    rove(matrix, ["a.cell", "tbody a.term", "thead button"], headings);
  }
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
    if (wider && !region.querySelector("a.cell, summary, a.term")) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
  };
  // A matrix that fits scrolls with the window, so that its head can stay in view; one that does not, in its region.
  const fit = (region) => {
    if (!region.querySelector("table.matrix")) return;
    region.classList.remove("fits", "tall");
    const fits = region.scrollWidth <= region.clientWidth + 1;
    region.classList.toggle("fits", fits);
    region.classList.toggle("tall", !fits);
  };
  const cues = () => regions.filter((region) => region.clientWidth).forEach((region) => {
    fit(region);
    cue(region);
  });
  for (const region of regions) region.addEventListener("scroll", () => cue(region), { passive: true });
  addEventListener("resize", cues);
  document.addEventListener("toggle", cues, true);

  // Show the meaning of a word beside it, while the pointer or the focus is on it. Escape hides it, and a second touch
  // follows the link. Screen readers have the same text by `aria-describedby`.
  const tip = createElement("div", "", "tip");
  tip.popover = "manual";
  tip.setAttribute("aria-hidden", "true");
  let shownFor = null;
  let leaving = 0;
  const hide = () => {
    if (shownFor) tip.hidePopover();
    shownFor = null;
  };
  const show = (link) => {
    clearTimeout(leaving);
    const meaning = byId(link.getAttribute("aria-describedby"));
    if (shownFor === link || !meaning) return;
    hide();
    shownFor = link;
    tip.textContent = meaning.textContent;
    tip.showPopover();
    put();
  };
  const put = () => {
    const [place, size] = [shownFor.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = `${Math.max(12, Math.min(place.left, innerWidth - size.width - 12))}px`;
    tip.style.top = `${place.bottom + 6 + size.height < innerHeight ? place.bottom + 6 : Math.max(6, place.top - size.height - 6)}px`;
  };
  const leave = () => {
    clearTimeout(leaving);
    leaving = setTimeout(hide, 150);
  };
  let touched = null;
  if (tip.showPopover) {
    document.body.append(tip);
    for (const link of document.querySelectorAll("a.term")) {
      link.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(link));
      link.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
      link.addEventListener("focus", () => show(link));
      link.addEventListener("blur", leave);
      link.addEventListener("click", (event) => {
        if (event.pointerType === "touch" && touched !== link) {
          event.preventDefault();
          show(link);
        } else hide();
        touched = link;
      });
    }
    tip.addEventListener("pointerenter", () => clearTimeout(leaving));
    tip.addEventListener("pointerleave", leave);
    addEventListener("keydown", (event) => event.key === "Escape" && hide());
    addEventListener("scroll", () => shownFor && put(), { passive: true });
  }

  // Print folded sections and the pictures of findings open, and fold them again afterwards. Long lists of records
  // stay as they are.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(":is(details.fold, .finding > .smallest > .where):not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
    opened = [];
  });

  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  byId("few").hidden = true;
  for (const element of document.querySelectorAll(".id, .finding li, .finding code.run, .matrix thead th, .verdicts tbody th")) breakWell(element);
  draw();
  cues();
  go();
})();
