// The inspector's page: it reads server-sent events through fetch, since the key is sent in a header and never in an
// address, keeps the last minutes, and draws what the slider points at.

const KEY = "pagedkv.inspector.key";
const KEPT = 300; // units of time: a second of an engine; of a replay, what the server says
const RECENT = 2; // events hold the steps of at least so many units; after a longer gap the history is read
const KEPT_NBYTES = 32 * 2 ** 20;
const FRAME_PERIOD = 1;
const NEAR = 3; // a map older than this is not shown for a moment
const STATE_BITS = 7, TENANT_SHIFT = 3;
const ORDER = ["live", "leased", "cached", "deferred", "free"];
const RETRY_MS = 2000;
const NUM_TENANT_SHADES = 6;
const MANY_BLOCKS = 1024, STRETCH = 64; // of many blocks, the map can show the stretches of which any block is used

const $ = (id) => document.getElementById(id);
const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const series = (place) => colour(`series-${(place % 8) + 1}`);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

function swatch(shade, kind = "swatch") {
  const made = element("span", { class: kind, "aria-hidden": "true" });
  if (kind === "swatch") made.style.background = shade;
  made.style.borderColor = shade;
  return made;
}

// What is known: the present, frames of the last minutes, and steps and misses by unit of time.
const known = {
  pools: [], tenants: [""], states: [], causes: [], requests: [], ended: [], numRequests: 0, step: null, nowS: 0,
  frames: [], units: new Map(), samples: [], tiers: [], loads: [], replay: null,
};
let unitS = 1;
let pausedAt = null; // seconds of the server's history; null: live
let poolPlace = 0;
let selected = null;

// Reading

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function read(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

function sayWhen() {
  const replay = known.replay;
  if (pausedAt != null) say("Paused");
  else if (replay == null) say("Live");
  else if (replay.is_over) say("The replay has ended");
  else if (replay.is_paused) say("The replay is paused");
  else say(replay.speed == null ? "Replaying, as fast as it can" : `Replaying, ${replay.speed} s of the trace a second`);
}

function askForKey(text) {
  say(text);
  sessionStorage.removeItem(KEY);
  $("key-form").hidden = false;
}

async function follow() {
  if (document.body.dataset.access === "keys" && !sessionStorage.getItem(KEY)) {
    askForKey("This server needs an administrator's key.");
    return;
  }
  for (;;) {
    try {
      const answer = await fetch("inspect/events", { headers: headers(), cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        askForKey((await answer.json()).error.message);
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      $("key-form").hidden = true;
      await followStream(answer.body);
      say("The server has ended; trying again.");
    } catch (problem) {
      say(`Not connected (${problem.message}); trying again.`);
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

async function followStream(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(text.slice(0, end)) ?? [];
      text = text.slice(end + 2);
      if (name === "end") return;
      if (name) take(name, JSON.parse(data));
    }
  }
}

function take(name, message) {
  const gapS = message.now_s - known.nowS;
  const isWider = message.unit_s !== unitS;
  if (isWider) known.units.clear();
  unitS = message.unit_s;
  if (name === "snapshot") {
    if (message.now_s < known.nowS) Object.assign(known, { frames: [], units: new Map(), samples: [] });
    known.states = message.block_states;
    known.causes = message.causes;
    known.pools = message.pools.map((pool) => ({ ...pool, map: bytesOf(pool.map) }));
    $("model").textContent = message.model;
    fillPools();
  } else {
    message.pools.forEach((change, place) => {
      const pool = known.pools[place];
      pool.counts = change.counts;
      pool.map = change.map ? bytesOf(change.map) : changed(pool.map, change);
    });
  }
  known.nowS = message.now_s;
  known.tenants = message.tenants;
  known.shares = message.shares;
  known.requests = message.requests;
  known.ended = message.ended;
  known.numRequests = message.num_requests;
  known.step = message.step;
  known.tiers = message.tiers;
  known.loads = message.loads;
  known.replay = message.replay;
  takeBuckets(message.buckets);
  keepFrame();
  if (name === "snapshot" || isWider || gapS > RECENT * unitS) readHistory();
  sayWhen();
  draw();
}

function changed(map, change) {
  const ids = bytesOf(change.ids);
  if (!ids.length) return map;
  const made = map.slice(); // frames keep the old one
  const values = bytesOf(change.values), view = new DataView(ids.buffer);
  values.forEach((value, place) => { made[view.getInt32(4 * place, true)] = value; });
  return made;
}

function takeBuckets(buckets) {
  const { start_s: starts, misses, width_s: widthS, ...columns } = buckets;
  const fresh = new Map();
  const unit = (startS) => {
    const at = unitAt(startS);
    return fresh.get(at) ?? fresh.set(at, { startS, widthS, misses: {} }).get(at);
  };
  starts.forEach((startS, place) => {
    for (const [name, column] of Object.entries(columns)) unit(startS)[name] = column[place];
  });
  for (const [startS, cause, tokens] of misses) unit(startS).misses[cause] = tokens;
  for (const [at, each] of fresh) known.units.set(at, each);
  for (const at of known.units.keys()) if (at < unitAt(known.nowS) - KEPT - 5) known.units.delete(at);
}

async function readHistory() {
  try {
    const history = await read(`inspect/history?from=${Math.max(0, known.nowS - KEPT * unitS).toFixed(6)}`);
    if (history.buckets.width_s === unitS) takeBuckets(history.buckets);
    const old = history.samples.time_s.map((timeS, place) => ({
      timeS,
      pools: history.samples.pools[place].map((counts) =>
        Object.fromEntries(history.block_states.map((state, at) => [state, counts[at]]))),
      shares: history.samples.shares[place],
    }));
    const firstS = known.samples[0]?.timeS ?? Infinity;
    known.samples = [...old.filter((each) => each.timeS < firstS), ...known.samples];
    draw();
  } catch (problem) {
    say(`The history could not be read (${problem.message}).`);
  }
}

function keepFrame() {
  const counts = known.pools.map((pool) => pool.counts);
  const last = known.frames.at(-1);
  if (last && known.nowS - last.timeS < FRAME_PERIOD * unitS) return;
  known.samples.push({ timeS: known.nowS, pools: counts, shares: known.shares });
  known.frames.push({
    timeS: known.nowS, maps: known.pools.map((pool) => pool.map), requests: known.requests, ended: known.ended,
    numRequests: known.numRequests, step: known.step, tenants: known.tenants,
      tiers: known.tiers, loads: known.loads,
  });
  const nbytes = known.pools.reduce((sum, pool) => sum + pool.map.length, 0) || 1;
  const most = Math.max(2, Math.min(KEPT / FRAME_PERIOD, Math.floor(KEPT_NBYTES / nbytes)));
  known.frames.splice(0, Math.max(0, known.frames.length - most));
  while (known.samples.length && known.samples[0].timeS < known.nowS - KEPT * unitS) known.samples.shift();
}

// The moment that is shown

function moment() {
  if (pausedAt == null) {
    return {
      timeS: known.nowS, maps: known.pools.map((pool) => pool.map), requests: known.requests, ended: known.ended,
      numRequests: known.numRequests, step: known.step, tenants: known.tenants,
      tiers: known.tiers, loads: known.loads,
    };
  }
  const near = known.frames.reduce((best, frame) =>
    best == null || Math.abs(frame.timeS - pausedAt) < Math.abs(best.timeS - pausedAt) ? frame : best, null);
  if (near == null || Math.abs(near.timeS - pausedAt) > NEAR * unitS) {
    return {
      timeS: pausedAt, maps: null, requests: [], ended: [], numRequests: 0, step: null, tenants: known.tenants, tiers: [], loads: [],
    };
  }
  return near;
}

function unitAt(timeS) { // the number of a unit; a bound such as 0.3 / 0.1 belongs to the unit that it begins
  return Math.floor(timeS / unitS + 1e-6);
}

function unitOf(timeS) {
  return known.units.get(unitAt(timeS)) ?? {};
}

function words(seconds) {
  for (const [size, one, many] of [[86400, "day", "days"], [3600, "hour", "hours"], [60, "minute", "minutes"]]) {
    if (seconds >= size) return seconds === size ? one : `${Number((seconds / size).toPrecision(2))} ${many}`;
  }
  return `${Number(seconds.toPrecision(2))} s`;
}

// Drawing

let isDue = false;
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const shown = moment();
    drawTime();
    drawReplay();
    drawTiles(shown);
    drawMap(shown);
    drawRequests(shown);
    drawTiers(shown);
    drawPlots(shown);
  });
}

function drawTime() {
  const agoS = pausedAt == null ? 0 : known.nowS - pausedAt;
  $("pause").textContent = pausedAt == null ? "Pause" : "Resume";
  $("pause").setAttribute("aria-pressed", String(pausedAt != null));
  $("time").textContent = pausedAt == null ? "live" : `${agoS.toFixed(unitS < 1 ? 2 : 0)} s ago`;
  $("slider").step = String(unitS);
  $("slider").min = String(-Math.max(1, Math.min(KEPT, unitAt(known.nowS))) * unitS);
  $("slider").value = String(-agoS);
  $("slider").setAttribute("aria-valuetext", $("time").textContent);
}

function drawReplay() { // what the report counts, so far
  const replay = known.replay;
  $("replay").hidden = replay == null;
  if (replay == null) return;
  $("hold").hidden = replay.is_over;
  $("hold").textContent = replay.is_paused ? "Resume the replay" : "Pause the replay";
  const missed = replay.missed.reduce((sum, [, tokens]) => sum + tokens, 0);
  const figures = [
    ["Time of the trace", `${known.nowS.toFixed(1)} s`, "time"],
    ["Requests", number(replay.requests), "requests"],
    ["Served", number(replay.finished), "finished"],
    ["Rejected", number(replay.rejected), "rejected"],
    ["Prompt tokens", number(replay.prompt), "prompt"],
    ["Hit", `${number(replay.hit)}${replay.prompt ? ` (${((100 * replay.hit) / replay.prompt).toFixed(1)} %)` : ""}`, "hit"],
    ["Missed", number(missed), "missed"],
    ...replay.missed.filter(([, tokens]) => tokens).map(([cause, tokens]) => [`Missed: ${cause}`, number(tokens), cause]),
  ];
  $("figures").replaceChildren(...figures.map(([name, value, key]) =>
    element("div", { "data-figure": key }, element("dt", {}, name), element("dd", {}, value))));
}

async function holdReplay() {
  try {
    const answer = await fetch("inspect/pause", {
      method: "POST", headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify({ paused: !known.replay.is_paused }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
  } catch (problem) {
    say(`The replay could not be paused (${problem.message}).`);
  }
}

function lastUnit(timeS) { // the last whole unit with steps, within a few
  for (let back = 1; back <= NEAR; back++) {
    const unit = unitOf(timeS - back * unitS);
    if (unit.steps) return unit;
  }
  return {};
}

function drawTiles(shown) {
  const isLive = pausedAt == null;
  const at = isLive ? lastUnit(shown.timeS) : unitOf(shown.timeS), lastS = 60 * unitS;
  let hit = 0, missed = 0, preempted = 0;
  for (const unit of known.units.values()) {
    if (unit.startS > shown.timeS || unit.startS < shown.timeS - lastS) continue;
    hit += unit.hit ?? 0;
    preempted += (unit.swapped_out ?? 0) + (unit.recomputed ?? 0);
    missed += Object.values(unit.misses).reduce((sum, tokens) => sum + tokens, 0);
  }
  const states = new Map();
  for (const request of shown.requests) states.set(request.state, (states.get(request.state) ?? 0) + 1);
  const step = shown.step;
  const stepMs = step && 1000 * (step.schedule_s + step.forward_s + step.sample_s + step.finish_s);
  const idle = shown.numRequests === 0;
  const tiles = [
    ["Running", step && (idle ? 0 : step.running)],
    ["Waiting", step && (idle ? 0 : step.waiting)],
    ["Swapped out", step && (idle ? 0 : step.swapped)],
    ["Tokens a second", at.steps ? (at.decoded + at.prefilled) / unitS : 0],
    [`Hit, last ${words(lastS)}`, hit + missed ? `${((100 * hit) / (hit + missed)).toFixed(0)} %` : "–"],
    [`Preemptions, last ${words(lastS)}`, preempted],
    ["Last step", step ? `${stepMs.toFixed(1)} ms` : "–"],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, typeof value === "string" ? value : number(value)))));
}

// The map

const layout = { columns: 1, cell: 1, gap: 0, rows: 1, ids: null }; // ids: those that are drawn; null: all

function usedIds(map) { // the ids of stretches with a used block; null where these are most of the pool, or none
  if (map.length <= MANY_BLOCKS) return null;
  const free = known.states.indexOf("free"), none = known.states.indexOf("null"), ids = [];
  for (let start = 0; start < map.length; start += STRETCH) {
    const end = Math.min(map.length, start + STRETCH);
    let isUsed = false;
    for (let id = start; id < end && !isUsed; id++) isUsed = (map[id] & STATE_BITS) !== free && (map[id] & STATE_BITS) !== none;
    if (isUsed) for (let id = start; id < end; id++) ids.push(id);
  }
  return ids.length && 2 * ids.length <= map.length ? ids : null;
}

const idAt = (place) => (layout.ids ? layout.ids[place] : place);
const placeOf = (id) => (layout.ids ? layout.ids.indexOf(id) : id);

function shadesOf(kind) {
  return kind === "tenant"
    ? known.tenants.map((_, place) => (place ? colour(`tenant-${((place - 1) % NUM_TENANT_SHADES) + 1}`) : colour("null")))
    : known.states.map((state) => colour(state));
}

function drawMap(shown) {
  const canvas = $("map"), map = shown.maps?.[poolPlace];
  $("map-note").hidden = map != null;
  if (map == null) {
    $("map-note").textContent = known.pools.length ? "No map was taken at this time: no page was open." : "No map yet.";
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
    $("legend").replaceChildren();
    return;
  }
  const used = usedIds(map);
  $("extent-choice").hidden = used == null;
  layout.ids = $("extent").value === "used" ? used : null;
  $("map-extent").textContent = layout.ids ? `${number(map.length - layout.ids.length)} unused blocks are left out.` : "";
  const num = layout.ids?.length ?? map.length, scale = window.devicePixelRatio || 1;
  const width = Math.max(50, Math.floor(canvas.clientWidth * scale));
  const most = Math.max(120, Math.floor(360 * scale));
  let cell = Math.max(1, Math.min(Math.floor(18 * scale), Math.floor(Math.sqrt((width * most) / num))));
  while (cell > 1 && Math.ceil(num / Math.floor(width / cell)) * cell > most) cell--;
  Object.assign(layout, { cell, columns: Math.floor(width / cell), gap: cell >= 4 ? 1 : 0, scale });
  layout.rows = Math.ceil(num / layout.columns);
  const height = layout.rows * cell;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  canvas.style.height = `${height / scale}px`;
  const pen = canvas.getContext("2d"), byTenant = $("colouring").value === "tenant";
  const shades = shadesOf("state"), tenantShades = shadesOf("tenant"), hasTenants = known.tenants.length > 1;
  const counts = new Array(known.states.length).fill(0), tenantCounts = new Array(known.tenants.length).fill(0);
  pen.clearRect(0, 0, width, height);
  if (cell === 1) drawPixels(pen, map, width, height, byTenant ? tenantShades : shades, byTenant);
  for (const each of map) {
    counts[each & STATE_BITS]++;
    if ((each & STATE_BITS) > 1) tenantCounts[each >> TENANT_SHIFT]++;
  }
  for (let place = 0; place < num && cell > 1; place++) {
    const id = idAt(place), state = map[id] & STATE_BITS, tenant = map[id] >> TENANT_SHIFT, hasContent = state > 1;
    const x = (place % layout.columns) * cell, y = Math.floor(place / layout.columns) * cell, size = cell - layout.gap;
    pen.fillStyle = byTenant && hasContent ? tenantShades[tenant] : shades[state];
    pen.fillRect(x, y, size, size);
    if (hasTenants && tenant && cell >= 6) {
      pen.strokeStyle = tenantShades[tenant];
      pen.lineWidth = Math.max(1, cell / 8);
      pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, size - pen.lineWidth, size - pen.lineWidth);
    }
  }
  const place = selected == null ? -1 : placeOf(selected);
  if (place >= 0 && place < num) {
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 2;
    pen.strokeRect((place % layout.columns) * cell - 1, Math.floor(place / layout.columns) * cell - 1, cell + 1, cell + 1);
  }
  $("legend").replaceChildren(...ORDER.map((state) => {
    const place = known.states.indexOf(state);
    return element("li", { "data-state": state, "data-number": counts[place] }, swatch(shades[place]), `${state} ${number(counts[place])}`);
  }));
  $("tenants").hidden = !hasTenants;
  $("tenants").replaceChildren(...(hasTenants ? known.tenants.flatMap((name, place) => tenantCounts[place]
    ? [element("li", {}, swatch(tenantShades[place], byTenant ? "swatch" : "swatch outline"), `${name || "no tenant"} ${number(tenantCounts[place])}`)]
    : []) : []));
  canvas.setAttribute("aria-label", `Map of ${number(map.length)} blocks: ${ORDER.map((state) => `${counts[known.states.indexOf(state)]} ${state}`).join(", ")}`);
}

function drawPixels(pen, map, width, height, shades, byTenant) {
  const image = pen.createImageData(width, height), free = rgb(colour("free")), table = shades.map(rgb);
  for (let place = 0; place < (layout.ids?.length ?? map.length); place++) {
    const id = idAt(place), state = map[id] & STATE_BITS;
    const shade = byTenant ? (state > 1 ? table[map[id] >> TENANT_SHIFT] : free) : table[state];
    image.data.set(shade, 4 * place);
  }
  pen.putImageData(image, 0, 0);
}

function rgb(shade) {
  const digits = parseInt(shade.slice(1), 16);
  return [digits >> 16, (digits >> 8) & 255, digits & 255, 255];
}

function blockAt(event) {
  const box = $("map").getBoundingClientRect();
  const column = Math.floor(((event.clientX - box.left) * layout.scale) / layout.cell);
  const row = Math.floor(((event.clientY - box.top) * layout.scale) / layout.cell);
  const id = idAt(row * layout.columns + column), pool = known.pools[poolPlace];
  return pool && column >= 0 && column < layout.columns && id > 0 && id < pool.num_blocks ? id : null;
}

let reading = 0;
function select(id, afterMs = 120) {
  if (id == null || id === selected) return;
  selected = id;
  draw();
  clearTimeout(reading);
  reading = setTimeout(() => showBlock(id), afterMs);
}

async function showBlock(id) {
  const pool = known.pools[poolPlace];
  $("block").hidden = false;
  try {
    const told = await read(`inspect/block/${encodeURIComponent(pool.name)}/${id}`);
    if (id !== selected) return;
    const age = told.unchanged_s == null ? "not watched" : `${told.may_be_longer ? "at least " : ""}${told.unchanged_s} s`;
    const rows = [
      ["state", told.state], ["for", age], ["tokens", number(told.num_tokens)],
      ["tenant", told.tenant ?? "none"], ["references", told.references],
      ["parent", told.parent ?? (told.digest ? "none: first, or gone" : "none")],
      ["hits ended here", told.hits], ["contents before", told.lives],
      ["lease", told.has_priority ? "high priority" : told.lease_s == null ? "none" : `${told.lease_s} s`],
      ["held by", told.holders.map((each) => `request ${each.number}`).join(", ") || "no request"],
      ["digest", told.digest ?? "none"],
    ];
    const title = element("h3", {}, `Block ${id}${pausedAt == null ? "" : ", as it is now"}`);
    const list = element("dl", {}, ...rows.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
    $("block").replaceChildren(title, list);
    if (told.token_ids?.length) $("block").append(...(told.text ? [element("pre", {}, told.text)] : []), element("p", { class: "soft" }, told.token_ids.join(" ")));
  } catch (problem) {
    $("block").replaceChildren(`Block ${id}: ${problem.message}`);
  }
}

function fillPools() {
  const names = known.pools.map((pool) => pool.name);
  $("pool-choice").hidden = names.length < 2;
  poolPlace = Math.min(poolPlace, names.length - 1);
  $("pool").replaceChildren(...names.map((name, place) => element("option", { value: place }, name)));
  $("pool").value = String(poolPlace);
}

// Requests

function why(request) {
  return [whyNot(request), ...request.tiers].filter(Boolean).join("; ");
}

function whyNot(request) {
  if (request.cause == null) return request.hit == null ? "" : "–";
  const ago = request.lost_blocks_ago == null ? "" : `, ${number(request.lost_blocks_ago)} blocks ago`;
  const group = request.group ? ` in group ${request.group}` : "";
  return `${request.cause} at ${number(request.position)}${group}${ago}`;
}

function drawRequests(shown) {
  const row = (request, kind) => element("tr", { class: kind },
    element("td", {}, String(request.number)), element("td", { class: "tenant" }, request.tenant ?? "–"),
    element("td", {}, request.state), element("td", {}, number(request.prompt)), element("td", {}, number(request.hit)),
    element("td", { class: "text" }, why(request)), element("td", { class: "spare" }, number(request.generated)),
    element("td", { class: "spare" }, number(request.preemptions)));
  $("requests").tBodies[0].replaceChildren(
    ...shown.requests.map((request) => row(request, "under-way")), ...shown.ended.map((request) => row(request, "over")));
  for (const cell of document.querySelectorAll("#requests .tenant")) cell.hidden = shown.tenants.length < 2;
  const more = shown.numRequests - shown.requests.length;
  $("requests-note").textContent = `${number(shown.numRequests)} under way${more > 0 ? `, of which ${number(more)} are not listed` : ""}; grey ones have ended.`;
}

// Tiers

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytes(value) {
  let unit = 0;
  for (; value >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

function drawTiers(shown) {
  $("tiers-panel").hidden = !shown.tiers.length;
  const row = (tier) => element("tr", { "data-tier": tier.name },
    element("td", {}, tier.name), element("td", {}, tier.state === "open" ? "out of service" : tier.state === "closed" ? "in service" : tier.state),
    element("td", {}, number(tier.entries)), element("td", {}, bytes(tier.nbytes)), element("td", {}, bytes(tier.cap_nbytes)),
    element("td", { class: "spare" }, number(tier.reads)), element("td", { class: "spare" }, number(tier.queued)),
    element("td", {}, number(tier.loaded_tokens)), element("td", {}, number(tier.hit_tokens)),
    element("td", { class: "spare" }, number(tier.evicted)),
    element("td", { class: "text" }, Object.entries(tier.not_loaded).map(([cause, tokens]) => `${number(tokens)} ${cause}`).join(", ") || "–"));
  $("tiers-table").tBodies[0].replaceChildren(...shown.tiers.map(row));
  $("loads").replaceChildren(...shown.loads.map((load) => element("li", {},
    `tokens ${number(load.start)} to ${number(load.end)} from ${load.tier}, for ${number(load.requests)} ${load.requests === 1 ? "request" : "requests"}`)));
  $("tiers-note").textContent = shown.loads.length ? "These loads are under way." : "No load is under way.";
}

// Plots

const PLOTS = [
  { title: "Tokens a second", lines: ["computed, prompts", "computed, decoded", "hit"], of: (unit) => [unit.prefilled, unit.decoded, unit.hit] },
  { title: "Requests", lines: ["running", "waiting", "swapped out"], lasts: true, of: (unit) => [unit.running, unit.waiting, unit.swapped] },
  { title: "Preemptions a second", lines: ["swapped out", "recomputed"], of: (unit) => [unit.swapped_out, unit.recomputed] },
  { title: "Blocks", lines: ORDER, samples: true },
  { title: "Blocks by tenant, in use or cached", tenants: true, samples: true },
  { title: "Missed prompt tokens a second, by cause", lines: null },
];

function makePlots() {
  PLOTS.forEach((plot, place) => {
    plot.canvas = element("canvas", { role: "img", "aria-labelledby": `plot-${place}` });
    plot.legend = element("ul", { class: "legend" });
    plot.figure = element("figure", {}, element("h3", { id: `plot-${place}` }, plot.title), plot.legend, plot.canvas);
    $("plots").append(plot.figure);
  });
}

function linesOf(plot, fromS, toS) {
  const units = [];
  for (let at = unitAt(fromS); at * unitS < toS; at++) units.push([at * unitS, known.units.get(at)]);
  if (plot.tenants) {
    const points = known.samples.filter((each) => each.timeS >= fromS && each.shares?.[poolPlace]);
    return known.tenants.map((name, tenant) => ({
      name: name || "no tenant", shade: shadesOf("tenant")[tenant],
      points: points.map((each) => [each.timeS, (each.shares[poolPlace][tenant] ?? [0, 0]).reduce((sum, blocks) => sum + blocks, 0)]),
    }));
  }
  if (plot.samples) {
    const points = known.samples.filter((each) => each.timeS >= fromS && each.pools[poolPlace]);
    return ORDER.map((state) => ({ name: state, shade: colour(state === "free" ? "null" : state), points: points.map((each) => [each.timeS, each.pools[poolPlace][state]]) }));
  }
  if (plot.lines == null) {
    const causes = [...new Set(units.flatMap(([, unit]) => Object.keys(unit?.misses ?? {})))].sort((a, b) => a - b);
    return causes.map((cause, place) => ({
      name: known.causes[cause] ?? "no cause", shade: series(place),
      points: units.map(([startS, unit]) => [startS, (unit?.misses[cause] ?? 0) / unitS]),
    }));
  }
  return plot.lines.map((name, at) => {
    let last = 0;
    const points = units.map(([startS, unit]) => {
      const value = unit && plot.of(unit)[at] != null ? plot.of(unit)[at] / (plot.lasts ? 1 : unitS) : undefined;
      last = value ?? (plot.lasts ? last : 0);
      return [startS, last];
    });
    return { name, shade: series(at), points };
  });
}

function drawPlots(shown) {
  const toS = known.nowS, fromS = Math.max(0, toS - KEPT * unitS);
  $("plots-title").textContent = unitS === 1 ? "Last minutes" : `Last ${words(KEPT * unitS)}`;
  for (const plot of PLOTS) plot.figure.hidden = Boolean(plot.tenants) && known.tenants.length < 2;
  for (const plot of PLOTS.filter((each) => !each.figure.hidden)) drawPlot(plot, linesOf(plot, fromS, toS), fromS, Math.max(toS, fromS + 10 * unitS), shown.timeS);
}

function drawPlot(plot, lines, fromS, toS, atS) {
  const canvas = plot.canvas, scale = window.devicePixelRatio || 1;
  const width = Math.max(50, Math.floor(canvas.clientWidth * scale)), height = Math.floor(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d"), foot = 18 * scale, top = 4 * scale;
  const highest = Math.max(1, ...lines.flatMap((line) => line.points.map(([, value]) => value)));
  pen.clearRect(0, 0, width, height);
  pen.font = `${12 * scale}px system-ui, sans-serif`;
  const left = pen.measureText(number(highest)).width + 8 * scale;
  const x = (timeS) => left + ((timeS - fromS) / (toS - fromS)) * (width - left - 2);
  const y = (value) => height - foot - (value / highest) * (height - foot - top);
  pen.strokeStyle = colour("grid");
  pen.fillStyle = colour("soft");
  pen.lineWidth = 1;
  for (const value of [0, highest]) {
    pen.beginPath();
    pen.moveTo(left, y(value));
    pen.lineTo(width, y(value));
    pen.stroke();
  }
  pen.textBaseline = "top";
  pen.fillText(number(highest), 0, y(highest) - top / 2);
  pen.textBaseline = "middle";
  pen.fillText("0", 0, y(0));
  pen.textBaseline = "bottom";
  pen.fillText(unitS < 1 ? `${(toS - fromS).toFixed(1)} s ago` : `${number(toS - fromS)} s ago`, left, height);
  pen.textAlign = "right";
  pen.fillText("now", width, height);
  pen.textAlign = "left";
  for (const line of lines) {
    pen.strokeStyle = line.shade;
    pen.lineWidth = 1.5 * scale;
    pen.beginPath();
    line.points.forEach(([timeS, value], place) => {
      if (place === 0) pen.moveTo(x(timeS), y(value));
      else pen.lineTo(x(timeS), y(value));
    });
    pen.stroke();
  }
  if (pausedAt != null) {
    pen.strokeStyle = colour("ink");
    pen.lineWidth = scale;
    pen.beginPath();
    pen.moveTo(x(atS), top);
    pen.lineTo(x(atS), height - foot);
    pen.stroke();
  }
  const at = (line) => line.points.reduce((value, [timeS, each]) => (timeS <= atS - (pausedAt == null && !plot.samples && !plot.lasts ? unitS : 0) ? each : value), 0);
  plot.legend.replaceChildren(...lines.map((line) => element("li", {}, swatch(line.shade), `${line.name} ${number(at(line))}`)));
}

// Prefixes

async function readPrefixes() {
  const pool = known.pools[poolPlace];
  if (!pool) return;
  try {
    const tree = await read(`inspect/prefixes?pool=${encodeURIComponent(pool.name)}`);
    const largest = tree.roots[0]?.all_blocks ?? 1;
    $("prefixes").replaceChildren(branches(tree.roots, tree.more, largest, tree.tenants));
    $("prefixes-note").textContent = `${number(tree.num_blocks)} cached blocks of pool ${tree.pool}, in use or free; hits are counted since the ${known.replay ? "replay" : "server"} began.`;
    $("refresh").textContent = "Read again";
  } catch (problem) {
    $("prefixes-note").textContent = problem.message;
  }
}

function branches(nodes, more, largest, tenants) {
  const list = element("ul", { class: "tree" });
  for (const node of nodes) {
    const tenant = node.tenant ? `, ${tenants[node.tenant]}` : "";
    const label = `${number(node.tokens)} tokens${tenant}: ${number(node.all_blocks)} blocks with what follows, ${number(node.live)} live, ${number(node.all_hits)} hits `;
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * node.all_blocks) / largest}%`;
    const show = element("button", { type: "button", "aria-label": `Show block ${node.block}` }, `block ${node.block}`);
    show.addEventListener("click", () => {
      select(node.block, 0);
      $("map").scrollIntoView({ block: "nearest" });
    });
    const item = element("li");
    if (node.children.length || node.more) {
      item.append(element("details", {}, element("summary", {}, label), branches(node.children, node.more, largest, tenants)), bar, show);
    } else {
      item.append(element("span", { class: "leaf" }, label), bar, show);
    }
    list.append(item);
  }
  if (more) list.append(element("li", { class: "soft" }, `${number(more)} smaller ones`));
  return list;
}

// What a person does

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  follow();
});
$("pause").addEventListener("click", () => {
  pausedAt = pausedAt == null ? known.nowS : null;
  sayWhen();
  draw();
});
$("hold").addEventListener("click", holdReplay);
$("slider").addEventListener("input", () => {
  const agoS = -Number($("slider").value);
  pausedAt = agoS > 0 ? known.nowS - agoS : null;
  sayWhen();
  draw();
});
$("pool").addEventListener("change", () => {
  poolPlace = Number($("pool").value);
  selected = null;
  $("block").hidden = true;
  draw();
});
$("colouring").addEventListener("change", draw);
$("extent").addEventListener("change", draw);
$("refresh").addEventListener("click", readPrefixes);
$("map").addEventListener("pointermove", (event) => select(blockAt(event)));
$("map").addEventListener("pointerdown", (event) => select(blockAt(event), 0));
$("map").addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.columns, ArrowDown: layout.columns };
  const pool = known.pools[poolPlace];
  if (!pool || !(event.key in steps)) return;
  event.preventDefault();
  const last = (layout.ids?.length ?? pool.num_blocks) - 1;
  const place = Math.min(last, Math.max(0, placeOf(selected ?? idAt(0)) + steps[event.key]));
  select(Math.max(1, idAt(place)));
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

makePlots();
draw();
follow();
