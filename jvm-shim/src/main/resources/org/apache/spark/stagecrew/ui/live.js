// Updates a page of the tab while the application runs: twice a second, it requests the page again, and replaces the page's
// content. If the driver takes long to generate the page twice in a row, the page is requested less often. A hidden page
// is not updated.
(function () {
  "use strict";
  const PERIOD = 500; // milliseconds
  const content = () => document.getElementById("stagecrew-content");

  // A reader who selects text, or fills in a field, keeps the current content.
  function isInUse() {
    const selection = document.getSelection();
    const selects = selection !== null && !selection.isCollapsed && content().contains(selection.anchorNode);
    const active = document.activeElement;
    return selects || (content().contains(active) && ["INPUT", "SELECT", "TEXTAREA"].includes(active.tagName));
  }

  // After the replacement, the same link has the focus.
  function replace(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("stagecrew-content");
    if (fresh === null || isInUse()) return;
    const links = () => Array.from(content().querySelectorAll("a"));
    const focused = links().indexOf(document.activeElement);
    if (fresh.innerHTML !== content().innerHTML) content().replaceChildren(...fresh.childNodes);
    content().dataset.stagecrewUpdates = String(Number(content().dataset.stagecrewUpdates || 0) + 1);
    if (focused >= 0 && links()[focused]) links()[focused].focus({ preventScroll: true });
  }

  let previous = 0; // how long the previous request took, in milliseconds

  async function update() {
    let pause = PERIOD;
    if (!document.hidden) {
      const began = performance.now();
      try {
        const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
        if (response.ok) replace(await response.text());
        else pause *= 10;
        const took = performance.now() - began;
        pause = Math.min(Math.max(pause, 3 * Math.min(took, previous)), 10000);
        previous = took;
      } catch (error) { // the application has ended, or the network is down
        pause *= 10;
      }
    }
    setTimeout(update, pause);
  }

  if (content() !== null) setTimeout(update, PERIOD);
})();
