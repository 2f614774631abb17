"""The rules by which Tandem reads what a model wrote, once more in Python and as plainly as they can be put: something to hold
the parser against. A stream is a list of tokens: "<|name|>" as str for a special one, bytes for any other."""
import re

CHANNELS = ("analysis", "commentary", "final")
ENDS = ("<|end|>", "<|return|>", "<|call|>")
OTHERS = ("user", "system", "developer", "tool")
MARK = "<|constrain|>"


def blank(text):
    return text.strip() == ""


class Reading:
    def __init__(self, functions=()):
        self.functions = set(functions)
        self.messages, self.open = [], None
        self.state, self.explicit, self.header = "header", False, b""

    # ---- headers

    def split_header(self, has_body):
        """(is the author another party, channel or None, what is left of the text)"""
        text, channel = self.header.decode(errors="replace"), None

        def cut(m):
            nonlocal channel
            channel = m.group(1) or channel
            return " "
        text = re.sub(r"<\|channel\|>([^\s<]*)", cut, text).replace(MARK, " " + MARK)
        word = (text.split() or [""])[0]
        role, hidden, takes = word.split(":")[0], False, False
        if word and not word.startswith("to="):
            takes = role == "assistant" and (self.explicit or has_body)
            if self.explicit and not takes:
                hidden = role in OTHERS or (has_body and "." in word)
        if takes or hidden:
            text = text.lstrip()[len(word):]
        return hidden, channel, text

    def open_message(self, hidden, channel, to, kind, complete=None, body=""):
        if to == "all":
            to = None
        if channel and channel not in CHANNELS:
            channel = next((c for c in CHANNELS if channel.startswith(c)), "commentary" if to else "final")
        self.open = {"hidden": hidden, "channel": channel, "recipient": to, "content_type": kind, "bytes": body.encode()}
        self.state = "body"
        if complete is not None:
            self.close(complete)

    def names_a_tool(self, word):
        return "." in word[:-1] or word in self.functions or word in ("python", "browser", "container")

    def begin_body(self):
        hidden, channel, text = self.split_header(True)
        to, kind, words = None, None, []
        for w in text.split():
            if w.startswith("to="):
                to = w[3:] or to
            elif w.startswith(MARK):
                kind = w
            else:
                words.append(w)
        if to is None and words and self.names_a_tool(words[0]):
            to = words.pop(0)
        if kind is None and words:
            kind = words[-1]
        self.open_message(hidden, channel, to, kind)

    def recover(self):
        hidden, channel, text = self.split_header(False)
        to, kind, had_to = None, None, False
        while True:
            m = re.match(r"\s*(\S+)", text)
            w = m.group(1) if m else ""
            if w.startswith("to="):
                had_to, to = True, w[3:] or to
            elif had_to and w.startswith(MARK) and "{" in w:
                kind = w[:w.index("{")]
                text = text[m.start(1) + len(kind):]
                break
            elif had_to and (w.startswith(MARK) or w == "json"):
                kind = w
            else:
                break
            text = text[m.end():]
        body = text.strip()
        if to is None and body.startswith(MARK) and "{" in body:
            kind, body = body[:body.index("{")].strip(), body[body.index("{"):]
        body = body.replace(MARK, "")
        if to not in (None, "all") or not blank(body):
            self.open_message(hidden, channel, to, kind, True, body)

    # ---- bodies

    def close(self, complete):
        m, self.open = self.open, None
        m["content"], m["complete"] = m.pop("bytes").decode(errors="replace"), complete
        to = m["recipient"]
        if m["hidden"]:
            m["kind"] = "hidden"
        elif to is not None and to != "assistant":
            is_call = to.startswith("functions.") or to in self.functions
            m["kind"] = "tool" if is_call else "other"
            if is_call and complete and blank(m["content"]):
                m["content"] = "{}"
        else:
            m["kind"] = "reasoning" if m["channel"] == "analysis" else "content"
        self.messages.append(m)

    # ---- tokens

    def header_from(self, explicit):
        self.state, self.explicit, self.header = "header", explicit, b""

    def feed(self, token):
        if token in ENDS or token == "<|start|>":
            if self.state == "header":
                self.recover()
            elif self.state == "body":
                self.close(True)
            self.state = "idle"
            if token == "<|start|>":
                self.header_from(True)
        elif token == "<|message|>":
            if self.state == "idle":
                self.header_from(False)
            if self.state == "header":
                self.begin_body()
        elif token == "<|channel|>":
            if self.state == "body":
                self.close(True)
            if self.state != "header":
                self.header_from(False)
            self.header += token.encode()
        elif self.state == "body":
            self.open["bytes"] += b"" if isinstance(token, str) else token
        else:
            if self.state == "idle":
                self.header_from(False)
            if token == MARK or isinstance(token, bytes):
                self.header += token.encode() if token == MARK else token

    def end(self, stopped_by):
        if self.state == "body":
            self.close(False)
        elif self.state == "header" and stopped_by != "length":
            self.recover()


def read(tokens, functions=(), stopped_by="stop"):
    """What the cases of tests/cases/harmony-cases.json expect: messages, hidden, stream, chat."""
    r = Reading(functions)
    for t in tokens:
        r.feed(t)
    r.end(stopped_by)
    keys = ("channel", "recipient", "content_type", "content", "complete")
    stream, joined, calls = [], {}, []
    for m in r.messages:
        kind, text = m["kind"], m["content"]
        if kind == "tool":
            calls.append({"name": m["recipient"].removeprefix("functions."), "arguments": text})
            if text:
                stream.append({"kind": "tool", "index": len(calls) - 1, "text": text})
        elif kind in ("reasoning", "content") and text:
            if kind in joined:
                text = "\n" + text
            joined[kind] = joined.get(kind, "") + text
            if stream and stream[-1]["kind"] == kind:
                stream[-1]["text"] += text
            else:
                stream.append({"kind": kind, "text": text})
    finish = "length" if stopped_by == "length" else "tool_calls" if calls else "stop"
    return {"messages": [{k: m[k] for k in keys} for m in r.messages if m["kind"] != "hidden"],
            "hidden": sum(m["kind"] == "hidden" for m in r.messages), "stream": stream,
            "chat": {"reasoning": joined.get("reasoning"), "content": joined.get("content"), "tool_calls": calls, "finish_reason": finish}}
