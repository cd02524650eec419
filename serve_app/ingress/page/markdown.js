// Markdown to DOM nodes. What a model writes is untrusted: nothing here parses HTML, so its tags are text, and links go
// to http and https only. Covers what models write: headings, lists, tables, quotes, code, emphasis, links.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(.+?)\*\*|__(.+?)__|\*(?!\s)(.+?)\*|\b_(?!\s)(.+?)_\b|~~(.+?)~~|\[([^\]]*)\]\(([^()\s]*)\)|\\([\\`*_{}[\]()#+.!~|<>-])/;
const DEEPEST = 8; // lists, quotes and emphasis within each other: deeper ones are shown as text

/** Replaces what `parent` holds by the rendered text. */
export function render(parent, text) {
  parent.replaceChildren(...blocks(text.split("\n"), 0));
}

function element(name, children, attributes = {}) {
  const made = document.createElement(name);
  made.append(...children);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function blocks(lines, depth) {
  const made = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) made.push(element("p", inline(paragraph.join("\n"), 0)));
    paragraph = [];
  };
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(FENCE);
    if (fence) {
      flush();
      const end = lines.findIndex((other, i) => i > at && other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).trim());
      const last = end < 0 ? lines.length : end; // a block that is still being written has no end yet
      made.push(code(lines.slice(at + 1, last).join("\n"), fence[2]));
      at = last + 1;
      continue;
    }
    const heading = line.match(HEADING);
    if (heading) {
      flush();
      made.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2], 0)));
    } else if (RULE.test(line)) {
      flush();
      made.push(element("hr", []));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      flush();
      const quoted = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) quoted.push(lines[at].match(QUOTE)[1]);
      made.push(element("blockquote", blocks(quoted, depth + 1)));
      continue;
    } else if (ITEM.test(line) && depth < DEEPEST) {
      flush();
      const [list, next] = listAt(lines, at, depth);
      made.push(list);
      at = next;
      continue;
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1])) {
      flush();
      const rows = [];
      let next = at + 2;
      for (; next < lines.length && lines[next].includes("|"); next++) rows.push(cells(lines[next], "td"));
      made.push(element("table", [element("thead", [cells(line, "th")]), element("tbody", rows)]));
      at = next;
      continue;
    } else if (!line.trim()) {
      flush();
    } else {
      paragraph.push(line);
    }
    at++;
  }
  flush();
  return made;
}

/** The list that begins at `lines[at]`, and the first line after it. Lines that stand deeper belong to the item above. */
function listAt(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const numbered = /\d/.test(mark);
  const items = [];
  let item = null;
  for (; at < lines.length; at++) {
    const found = lines[at].match(ITEM);
    if (found && found[1].length <= indent.length) {
      if (/\d/.test(found[2]) !== numbered) break;
      item = [found[3]];
      items.push(item);
    } else if (!lines[at].trim()) {
      const next = lines[at + 1] ?? "";
      if (!ITEM.test(next) && !/^\s{2,}\S/.test(next)) break;
      item.push("");
    } else if (found || /^\s/.test(lines[at])) {
      item.push(lines[at].slice(Math.min(indent.length + 2, lines[at].search(/\S/))));
    } else {
      break;
    }
  }
  const made = items.map((own) => {
    const inner = blocks(own, depth + 1);
    const only = inner[0]?.tagName === "P" ? [...inner[0].childNodes] : [];
    return element("li", only.length ? [...only, ...inner.slice(1)] : inner);
  });
  return [element(numbered ? "ol" : "ul", made, numbered ? { start: parseInt(mark) } : {}), at];
}

function cells(line, name) {
  const texts = line.trim().replace(/^\||\|$/g, "").split("|");
  return element("tr", texts.map((text) => element(name, inline(text.trim(), 0))));
}

function code(text, language) {
  const shown = element("code", [text]);
  return element("pre", [shown], { tabindex: 0, "aria-label": language ? `Code, ${language}` : "Code" });
}

function inline(text, depth) {
  const made = [];
  let rest = text;
  while (rest) {
    const found = depth < DEEPEST ? rest.match(INLINE) : null;
    if (!found) break;
    if (found.index) made.push(rest.slice(0, found.index));
    const [all, , codeText, strong, strong2, em, em2, struck, label, target, escaped] = found;
    const within = (name, inner) => made.push(element(name, inline(inner, depth + 1)));
    if (codeText !== undefined) made.push(element("code", [codeText]));
    else if (strong ?? strong2) within("strong", strong ?? strong2);
    else if (em ?? em2) within("em", em ?? em2);
    else if (struck) within("del", struck);
    else if (escaped) made.push(escaped);
    else made.push(link(all, label, target, depth));
    rest = rest.slice(found.index + all.length);
  }
  if (rest) made.push(rest);
  return made;
}

function link(all, label, target, depth) {
  if (!/^https?:\/\//i.test(target)) return all;
  const attributes = { href: target, rel: "noopener noreferrer nofollow", target: "_blank", title: target };
  return element("a", inline(label || target, depth + 1), attributes);
}
