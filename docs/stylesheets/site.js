// The theme adds these elements when a page is open, so they cannot be changed when the site is built.
new MutationObserver(() => {
  // Buttons of code blocks come in a <nav> each. They are no landmarks of the page.
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
  // A table that scrolls must be reachable by keyboard.
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
}).observe(document.documentElement, { childList: true, subtree: true });
