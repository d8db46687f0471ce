// Charts in the page's colours, which follow the light and the dark scheme.

const { uPlot } = window;

export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Steps of an axis that counts things. */
export const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];

const FONT = '11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace';
const AXIS_PX = 46;

const axis = (more) => ({
  stroke: () => color('muted'),
  grid: { stroke: () => color('grid'), width: 1 },
  ticks: { show: false },
  font: FONT,
  ...more,
});

/** Keep a chart as wide as its place. */
function follow(plot, place, height) {
  new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height });
  }).observe(place);
}

/** From nothing to a little above the highest value, and never less than `least`. */
const fromZero = (least) => (_, __, max) => [0, Math.max(least, (max ?? 0) * 1.1)];

const inPowers = (least, most) => (_, min, max) => [
  Math.min(least, min ?? least),
  Math.max(most, (max ?? most) * 1.2),
];

const isPower = (value) => Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6);
const powersOnly = (_, splits) => splits.map((value) => (isPower(value) ? value : null));

/** Lines over the last `windowS` seconds; the first column of its data is seconds before now.
 *  Each series: {color, fill, points, dash, steps, isRight}; the last says that it has a scale
 *  of its own, at the right side. */
export function timeChart(place, { windowS, series, format, incrs, least = 1, log = null }) {
  const height = 150;
  const right = series.find((each) => each.isRight);
  const lines = series.map((each) => ({
    scale: each.isRight ? 'right' : 'y',
    stroke: () => color(each.color),
    fill: each.fill ? () => color(`${each.color}-soft`) : undefined,
    width: each.points ? 0 : 1.5,
    dash: each.dash,
    paths: each.points ? () => null : each.steps ? uPlot.paths.stepped({ align: -1 }) : undefined,
    points: each.points
      ? { show: true, size: 6, width: 0, fill: () => color(each.color) }
      : { show: false },
    spanGaps: false,
  }));
  const plot = new uPlot(
    {
      width: place.clientWidth || 300,
      height,
      padding: [8, right ? 0 : 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: {
        x: { time: false, range: () => [-windowS, 0] },
        y: log ? { distr: 3, range: inPowers(...log) } : { range: fromZero(least) },
        ...(right && { right: { range: fromZero(least) } }),
      },
      axes: [
        axis({
          size: 24,
          splits: () => [-windowS, (-2 * windowS) / 3, -windowS / 3, 0],
          values: (_, splits) => splits.map((s) => (s ? `${Math.round(s)} s` : 'now')),
        }),
        axis({
          size: AXIS_PX,
          space: 28,
          incrs,
          ...(log && {
            filter: powersOnly,
            grid: { stroke: () => color('grid'), width: 1, filter: powersOnly },
          }),
          values: (_, splits) => splits.map((s) => (s === null ? '' : format(s))),
          ...(right && { stroke: () => color(series[0].color) }),
        }),
        ...(right
          ? [axis({
            scale: 'right',
            side: 1,
            size: AXIS_PX,
            space: 28,
            grid: { show: false },
            stroke: () => color(right.color),
            values: (_, splits) => splits.map(format),
          })]
          : []),
      ],
      series: [{}, ...lines],
    },
    [[], ...series.map(() => [])],
    place,
  );
  follow(plot, place, height);
  return plot;
}

/** Columns, one per step; `marks(draw)` may draw over them. */
export function stepLane(place, { height, series, format, least, hasAxis, incrs, marks }) {
  const bars = uPlot.paths.bars({ size: [1, 24, 1], gap: 1, align: 0 });
  const plot = new uPlot(
    {
      width: place.clientWidth || 300,
      height,
      padding: [6, 10, hasAxis ? 0 : 6, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: (_, min, max) => [(min ?? 0) - 0.5, (max ?? 1) + 0.5] },
        y: { range: fromZero(least) },
      },
      axes: [
        hasAxis
          ? axis({ size: 24, grid: { show: false }, space: 80, values: hasAxis })
          : { show: false },
        axis({ size: AXIS_PX, space: 26, incrs, values: (_, splits) => splits.map(format) }),
      ],
      series: [
        {},
        ...series.map((name) => ({
          stroke: () => color(name),
          fill: () => color(name),
          width: 0,
          paths: bars,
          points: { show: false },
        })),
      ],
      hooks: { drawClear: marks ? [marks] : [] },
    },
    [[], ...series.map(() => [])],
    place,
  );
  plot.root.setAttribute('aria-hidden', 'true');
  follow(plot, place, height);
  return plot;
}
