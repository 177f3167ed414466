// Tells the values of a drawing where the pointer is, or where the arrow keys have led. Without it nothing is lost:
// tables have the numbers. Reads what the drawings carry (data-box, data-places, data-headings, data-values) and the
// names in the legend; sends no requests.
for (const figure of document.querySelectorAll("figure")) {
  const carrier = figure.querySelector("svg[data-values]");
  if (!carrier) continue;
  const names = Array.from(figure.querySelectorAll(".legend span"), name => name.textContent);
  const places = carrier.dataset.places.split(" ").map(Number);
  const headings = carrier.dataset.headings.split("|");
  const series = carrier.dataset.values.split(";").map(texts => texts.split("|"));
  const area = figure.querySelector(".scroll");
  const tip = figure.appendChild(document.createElement("output"));
  const guide = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  guide.className = "guide";
  let current = -1;

  const hide = () => { tip.hidden = guide.hidden = true; current = -1; };
  const drawing = () => Array.from(area.querySelectorAll("svg[data-box]")).find(svg => svg.getClientRects().length);

  const axes = svg => {
    const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
    const box = svg.getBoundingClientRect(), around = figure.getBoundingClientRect();
    return {
      left: box.left + left * box.width - around.left, width: (right - left) * box.width,
      top: box.top + top * box.height - around.top, height: (bottom - top) * box.height, around,
    };
  };

  const show = number => {
    const svg = drawing();
    if (!svg) return;
    const { left, width, top, height, around } = axes(svg);
    const x = left + places[number] * width;
    current = number;
    tip.replaceChildren(document.createElement("b"));
    tip.firstChild.textContent = headings[number];
    series.forEach((texts, which) => {
      const row = tip.appendChild(document.createElement("span"));
      row.textContent = names.length ? `${names[which]}: ${texts[number]}` : texts[number];
    });
    tip.hidden = guide.hidden = false;
    Object.assign(guide.style, { left: `${x}px`, top: `${top}px`, height: `${height}px` });
    const aside = x + tip.offsetWidth + 12 > around.width ? x - tip.offsetWidth - 8 : x + 8;
    Object.assign(tip.style, { left: `${Math.max(0, aside)}px`, top: `${top + 4}px` });
  };

  const follow = event => {
    const svg = drawing();
    if (!svg) return;
    const { left, width, around } = axes(svg);
    const share = (event.clientX - around.left - left) / width;
    const far = place => Math.abs(place - share);
    show(places.reduce((nearest, place, number) => (far(place) < far(places[nearest]) ? number : nearest), 0));
  };

  area.addEventListener("pointermove", follow);
  area.addEventListener("pointerdown", follow);
  area.addEventListener("pointerleave", hide);
  area.addEventListener("blur", hide);
  area.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(Math.min(places.length - 1, Math.max(0, current < 0 ? 0 : current + step)));
  });
  hide();
}
