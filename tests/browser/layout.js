// What is wrong with the layout of this page, as a list of sentences; measured, not presumed. An expression.
(() => {
  const SLACK = 1.0; // of a pixel's rounding on either side
  const LEAST_SIZE = 9; // pixels of the font
  const WHOLE_WORD = /[\p{L}\p{N}]{2,9}/gu; // letters of a word that has to stand on one line
  const LONGEST_NAME = 16; // letters between two spaces; of longer names, paths among them, any part may be broken
  const faults = [];
  const shorten = text => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 40));
  const place = box => `${box.left.toFixed(0)},${box.top.toFixed(0)}-${box.right.toFixed(0)},${box.bottom.toFixed(0)}`;
  const isShown = element => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const page = document.documentElement;

  if (page.scrollWidth > page.clientWidth) {
    faults.push(`the page is ${page.scrollWidth} wide in a window of ${page.clientWidth}`);
  }

  // Corners of a text of a drawing, which may be turned; of the lines of a letter's box the inner two thirds.
  const corners = text => {
    const box = text.getBBox(), matrix = text.getScreenCTM(), cut = box.height / 6;
    const at = (x, y) => new DOMPoint(x, y).matrixTransform(matrix);
    const [right, top, bottom] = [box.x + box.width, box.y + cut, box.y + box.height - cut];
    return [at(box.x, top), at(right, top), at(right, bottom), at(box.x, bottom)];
  };
  const upright = ({ left, top, right, bottom }) => {
    const cut = (bottom - top) / 6;
    return [[left, top + cut], [right, top + cut], [right, bottom - cut], [left, bottom - cut]].map(([x, y]) => ({ x, y }));
  };
  // Two convex shapes are apart where a side of one of them has the other on its far side (separating axes).
  const areApart = (one, other) => [one, other].some(shape => shape.some((from, number) => {
    const to = shape[(number + 1) % shape.length], [x, y] = [from.y - to.y, to.x - from.x], long = Math.hypot(x, y);
    const along = points => points.map(point => (point.x * x + point.y * y) / long);
    const [mine, theirs] = [along(one), along(other)];
    return Math.max(...mine) < Math.min(...theirs) + SLACK || Math.max(...theirs) < Math.min(...mine) + SLACK;
  }));

  // Pieces of text, as far as boxes that scroll let them be seen.
  const pieces = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || !isShown(parent) || parent.closest("title, style, script")) continue;
    const drawing = parent.closest("svg");
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const word of drawing || parent.closest("pre") ? [] : node.data.matchAll(WHOLE_WORD)) {
      const around = node.data.slice(0, word.index).match(/\S*$/)[0] + node.data.slice(word.index).match(/^\S*/)[0];
      if (around.length > LONGEST_NAME) continue;
      const piece = document.createRange();
      piece.setStart(node, word.index);
      piece.setEnd(node, word.index + word[0].length);
      const lines = new Set([...piece.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) faults.push(`the word ${shorten(word[0])} of ${shorten(node.data)} is broken into ${lines.size} lines`);
    }
    const boxes = drawing ? [parent.getBoundingClientRect()] : [...range.getClientRects()];
    for (const box of boxes) {
      if (box.width < 0.5 || box.height < 0.5) continue;
      let { left, top, right, bottom } = box;
      for (let around = parent; around && around !== page; around = around.parentElement) {
        const style = getComputedStyle(around);
        if (around === drawing || style.overflowX === "visible") continue;
        const edge = around.getBoundingClientRect();
        const isScrolled = around.classList.contains("scroll") && around.querySelector("table") && !parent.closest("caption");
        if (!isScrolled && (left < edge.left - SLACK || right > edge.right + SLACK)) {
          faults.push(`${shorten(node.data)} at ${place(box)} is clipped by ${around.tagName}.${around.className}`);
        }
        left = Math.max(left, edge.left); right = Math.min(right, edge.right);
      }
      if (drawing) {
        const edge = drawing.getBoundingClientRect();
        const size = parseFloat(getComputedStyle(parent).fontSize) * edge.width / drawing.viewBox.baseVal.width;
        if (size < LEAST_SIZE) faults.push(`${shorten(node.data)} is written ${size.toFixed(1)} pixels high`);
        if (left < edge.left - SLACK || right > edge.right + SLACK || top < edge.top - SLACK || bottom > edge.bottom + SLACK) {
          faults.push(`${shorten(node.data)} at ${place(box)} leaves its drawing at ${place(edge)}`);
        }
      } else if (left < -SLACK || right > page.clientWidth + SLACK) {
        faults.push(`${shorten(node.data)} at ${place(box)} leaves the window`);
      }
      if (right - left > SLACK) {
        pieces.push({ top, bottom, node, shape: drawing ? corners(parent) : upright({ left, top, right, bottom }) });
      }
    }
  }

  // Pieces that lie over one another.
  pieces.sort((one, other) => one.top - other.top);
  pieces.forEach((one, number) => {
    for (let next = number + 1; next < pieces.length && pieces[next].top < one.bottom; next += 1) {
      const other = pieces[next];
      if (one.node !== other.node && !areApart(one.shape, other.shape)) {
        faults.push(`${shorten(one.node.data)} and ${shorten(other.node.data)} overlap at ${other.top.toFixed(0)} from the top`);
      }
    }
  });

  // A box may be scrolled only for a table that is wider than a narrow screen.
  for (const box of document.querySelectorAll(".scroll")) {
    if (isShown(box) && box.scrollWidth > box.clientWidth + SLACK && !(box.querySelector("table") && innerWidth < 800)) {
      faults.push(`${box.getAttribute("aria-label")} is ${box.scrollWidth} wide in a box of ${box.clientWidth}`);
    }
  }
  return faults;
})()
