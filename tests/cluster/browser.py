"""Headless Chromium over its debugging pipe: just enough to use a page and look at it. Standard library only."""
import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import time

PROGRAM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


class Browser:
    """One page of one browser process. Commands are those of the DevTools protocol."""

    def __init__(self, directory, patience=60):
        self.patience = patience
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self.log = open(pathlib.Path(directory) / "chromium.log", "ab")
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser} {to_browser}<&- {from_browser}>&-; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", PROGRAM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--disable-background-networking",
             "--disable-component-update", f"--user-data-dir={directory}/profile", "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=self.log, stderr=self.log)
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._next, self.events, self.session = b"", 0, [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next((t["targetId"] for t in targets if t["type"] == "page"), None)
        page = page or self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _read(self, end):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._in, 1 << 16)
            assert data, f"the browser has ended: {self.process.poll()}"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self._next += 1
        command = {"id": self._next, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        end = time.monotonic() + self.patience
        while True:
            m = self._read(end)
            if m.get("id") == command["id"]:
                assert "error" not in m, m
                return m["result"]
            self.events.append(m)

    def js(self, expression):
        """The expression's value, awaited if it is a promise."""
        r = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in r, r["exceptionDetails"]
        return r["result"].get("value")

    def wait(self, what, expression):
        end = time.monotonic() + self.patience
        while not self.js(expression):
            assert time.monotonic() < end, f"waited for: {what}"
            time.sleep(0.05)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait(f"{url} is there", f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, key, code):
        for kind in ("rawKeyDown", "char", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text="\r" if kind == "char" else "")

    def screenshot(self, path, width=1000, height=700):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        data = self.call("Page.captureScreenshot", format="png")["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))

    def complaints(self):
        """What the page's console and the browser had to say against it."""
        bad = []
        for e in self.events:
            p = e.get("params", {})
            if e.get("method") == "Runtime.exceptionThrown":
                bad.append(p["exceptionDetails"])
            elif e.get("method") == "Log.entryAdded" and p["entry"]["level"] == "error":
                bad.append(p["entry"])
        return bad

    def hosts(self):
        """Where the page's requests went."""
        return {e["params"]["request"]["url"].split("/")[2] for e in self.events
                if e.get("method") == "Network.requestWillBeSent" and e["params"]["request"]["url"].startswith("http")}

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self.session = None
            self.call("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._out)
        os.close(self._in)
        self.log.close()
