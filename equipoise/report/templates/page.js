"use strict";
// Wires what was made in Python: draws the charts, switches views and colours, unpacks downloads. Computes no figure.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const themeButton = document.getElementById("theme");
  const PRINT_WIDTH = 680;
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
  let chosen = null;
  // What paper opened and the screen closes again.
  let closed = [];

  const scheme = () => chosen ?? (systemDark.matches ? "dark" : "light");

  function colours(chart, name) {
    const theme = data.themes[name];
    const patch = { template: theme.template };
    if (chart.scale) patch["coloraxis.colorscale"] = theme.scales[chart.scale];
    return patch;
  }

  // A series that the shown view does not draw is not in its legend.
  function listSeries(chart, visible) {
    const shown = new Set(chart.traces.filter((_, place) => visible[place]).map((trace) => trace.name));
    for (const item of document.querySelectorAll(`[data-legend="${CSS.escape(chart.name)}"]`)) {
      item.hidden = !shown.has(item.dataset.series);
    }
  }

  async function draw(chart) {
    if (chart.views.length) listSeries(chart, chart.views[0].visible);
    await Plotly.newPlot(chart.name, chart.traces, chart.layout, CONFIG);
    await Plotly.relayout(chart.name, colours(chart, scheme()));
  }

  function recolour(name) {
    themeButton.textContent = name === "dark" ? "Light" : "Dark";
    return Promise.all(data.charts.map((chart) => Plotly.relayout(chart.name, colours(chart, name))));
  }

  function choose(name) {
    chosen = name;
    root.dataset.scheme = name;
    return recolour(name);
  }

  function switchView(button) {
    const chart = data.charts.find((candidate) => candidate.name === button.dataset.chart);
    const view = chart.views[Number(button.dataset.view)];
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    document.querySelector(`[data-shown="${CSS.escape(chart.name)}"]`).textContent = button.textContent;
    listSeries(chart, view.visible);
    return Plotly.update(chart.name, { visible: view.visible }, view.layout);
  }

  async function unpack(name) {
    const packed = document.querySelector(`script[data-file="${CSS.escape(name)}"]`).textContent;
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).blob();
  }

  async function loadPlotly() {
    const script = document.createElement("script");
    script.textContent = await (await unpack("plotly.min.js")).text();
    document.head.append(script);
  }

  async function download(name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await unpack(name));
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    // A busy machine reads the blob long after the click.
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  // A chart that is drawn while it is folded does not know its width.
  async function unfold(part) {
    // Paper has a width of its own.
    if (!part.open || closed.length) return;
    await Promise.all([...part.querySelectorAll(".plot")].map((plot) => Plotly.Plots.resize(plot)));
    part.dataset.drawn = "true";
  }

  function forPaper() {
    // A browser may say twice that it prints.
    closed.push(...document.querySelectorAll("details:not([open])"));
    for (const part of closed) part.open = true;
    for (const chart of data.charts) {
      Plotly.relayout(chart.name, { ...colours(chart, "light"), width: PRINT_WIDTH, autosize: false });
    }
  }

  function forScreen() {
    for (const part of closed) part.open = false;
    closed = [];
    for (const chart of data.charts) {
      Plotly.relayout(chart.name, { ...colours(chart, scheme()), width: null, autosize: true });
    }
  }

  if (typeof DecompressionStream === "undefined") {
    document.getElementById("too-old").hidden = false;
    return;
  }

  themeButton.addEventListener("click", () => choose(scheme() === "dark" ? "light" : "dark"));
  systemDark.addEventListener("change", () => chosen === null && recolour(scheme()));
  for (const part of document.querySelectorAll("details.more")) part.addEventListener("toggle", () => unfold(part));
  addEventListener("beforeprint", forPaper);
  addEventListener("afterprint", forScreen);
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => switchView(button));
  }
  for (const button of document.querySelectorAll("[data-download]")) {
    button.addEventListener("click", () => download(button.dataset.download));
  }

  themeButton.textContent = scheme() === "dark" ? "Light" : "Dark";
  loadPlotly()
    .then(() => Promise.all(data.charts.map(draw)))
    .then(() => { document.body.dataset.ready = "true"; });
})();
