"use strict";
// Libraries and data travel gzip-compressed and base64-coded in text/plain script elements.
const unpack = async (element) => {
  const coded = atob(element.textContent);
  const bytes = Uint8Array.from(coded, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

const loadPlotly = async () => {
  const script = document.createElement("script");
  script.textContent = await unpack(document.getElementById("plotly-source"));
  document.head.append(script);
};

const groupCache = new Map();
const loadGroup = async (number) => {
  if (!groupCache.has(number)) {
    const element = document.querySelector(`script.data[data-group="${number}"]`);
    groupCache.set(number, JSON.parse(await unpack(element)));
  }
  return groupCache.get(number);
};
