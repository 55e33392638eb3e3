// Browsers start no Worker from a file. On pages that are opened as files, a hidden frame runs the search's worker instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.run(next)), Promise.resolve());
      this.ready = this.run(url);
    }

    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: () => reject(new Error(`cannot load ${url}`)) });
        this.inner.document.body.append(script);
      });
    }

    // What is sent before the script runs would find no listener.
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
