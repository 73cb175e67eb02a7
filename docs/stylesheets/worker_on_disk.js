// Browsers start no worker from a page on a disk (file://). Run its script in a hidden frame instead, for the search.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.srcdoc = `<script>
        self.postMessage = (data) => parent.postMessage(data, "*");
        self.importScripts = (...urls) => Promise.all(urls.map((address) => new Promise((loaded, failed) => {
          const script = document.createElement("script");
          Object.assign(script, { src: address, onload: loaded, onerror: failed });
          document.head.append(script);
        })));
      <\/script><script src="${new URL(url, document.baseURI)}"><\/script>`;
      this.ready = new Promise((loaded) => { frame.onload = () => loaded(frame.contentWindow); });
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        this.onmessage?.(copy);
      });
      document.body.append(frame);
    }
    postMessage(data) {
      // Not by postMessage of the frame, which sends to this page.
      this.ready.then((target) => target.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
