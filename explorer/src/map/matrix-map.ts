// A queries × keys map in OpenLayers: float tiles, coloured here, on a canvas. Entry (query i, key j) covers the square
// from (j, −i) to (j + 1, −i − 1), so that row 0 is at the top.

import OpenLayersMap from "ol/Map";
import View from "ol/View";
import { defaults as defaultInteractions } from "ol/interaction/defaults";
import TileLayer from "ol/layer/Tile";
import Projection from "ol/proj/Projection";
import ImageTile from "ol/source/ImageTile";
import TileGrid from "ol/tilegrid/TileGrid";
import { TILE, topLevel, type Plane } from "../data/source";
import { colourTile, type Norm, type Palette } from "./colours";
import { cache, tileName, type Layer } from "./tile-cache";

const LARGEST = 64; // pixels of an entry at the deepest zoom
const projection = new Projection({ code: "entries", units: "pixels" });

export interface Paint {
  plane: Plane;
  norm: Norm;
  palette: Palette;
}

export interface Frame {
  resolution: number; // entries per pixel
  left: number; // key at the left edge, as a fraction
  top: number; // query at the top edge
  width: number; // in pixels
  height: number;
}

const WHOLE = "whole"; // a property of a view: it shows the whole map, and keeps doing so when its window changes

/**
 * A view of a map of some length; maps that are linked share one. `at` is the key and query at its centre, and the
 * binary logarithm of the pixels of an entry; without it, the whole map is shown.
 */
export function makeView(length: number, at: { x: number; y: number; z: number } | null): View {
  const margin = length * 0.02;
  const view = new View({
    projection,
    center: [length / 2, -length / 2],
    resolution: length / 400,
    minResolution: 1 / LARGEST,
    maxResolution: Math.max(length / 160, 1 / LARGEST),
    extent: [-margin, -length - margin, length + margin, margin],
    showFullExtent: true,
    constrainOnlyCenter: true,
    enableRotation: false,
  });
  if (at) {
    view.setResolution(2 ** -at.z);
    view.setCenter([at.x, -at.y]);
  }
  view.set(WHOLE, at === null);
  return view;
}

export function showsWhole(view: View): boolean {
  return view.get(WHOLE) === true;
}

/** The finest level whose cells are at least a pixel wide: no cell is ever left out of the picture. */
export function levelFor(resolution: number, length: number): number {
  return Math.min(topLevel(length), Math.max(0, Math.ceil(Math.log2(resolution) - 1e-6)));
}

export class MatrixMap {
  private readonly map: OpenLayersMap;
  private layer: Layer | null = null;
  private paint: Paint | null = null;
  private shown: TileLayer | null = null;

  /**
   * @param target the element to fill
   * @param onFrame called after every frame, to draw rulers and the cursor
   * @param onError called if a tile cannot be loaded
   * @param onSettled called when all tiles in sight are drawn
   */
  constructor(
    target: HTMLElement,
    private readonly onFrame: (frame: Frame) => void,
    private readonly onError: (error: unknown) => void,
    onSettled: () => void,
    calm: boolean,
  ) {
    const duration = calm ? 0 : 200;
    this.map = new OpenLayersMap({
      target,
      controls: [],
      interactions: defaultInteractions({ keyboard: false, altShiftDragRotate: false, pinchRotate: false, zoomDuration: duration }),
      maxTilesLoading: 8,
    });
    this.map.on("postrender", () => {
      const frame = this.frame();
      if (frame) this.onFrame(frame);
    });
    this.map.on("rendercomplete", onSettled);
    const moved = () => this.view.set(WHOLE, false);
    this.map.on("pointerdrag", moved);
    for (const kind of ["wheel", "dblclick"]) this.map.getViewport().addEventListener(kind, moved, { passive: true });
  }

  get view(): View {
    return this.map.getView();
  }

  setView(view: View): void {
    if (this.map.getView() !== view) this.map.setView(view);
  }

  /** Show the whole map. */
  fit(): void {
    const size = this.map.getSize();
    if (!this.layer || !size || !size[0] || !size[1]) return;
    const { length } = this.layer;
    this.view.setResolution(length / (Math.min(size[0], size[1]) * 0.98));
    this.view.setCenter([length / 2, -length / 2]);
    this.view.set(WHOLE, true);
  }

  /** Show a layer; the former one stays until the new one is drawn, so that nothing flashes. */
  show(layer: Layer, paint: Paint): void {
    if (this.layer?.name === layer.name && this.paint && samePaint(this.paint, paint)) return;
    [this.layer, this.paint] = [layer, paint];
    const next = this.tiles(layer, paint);
    const former = this.shown;
    this.shown = next;
    this.map.addLayer(next);
    if (former) {
      const layers = this.map.getLayers();
      const drop = () => {
        for (const old of layers.getArray().slice()) {
          if (old === this.shown) break; // those below the newest
          layers.remove(old);
          old.dispose();
        }
      };
      this.map.once("rendercomplete", drop);
    }
  }

  frame(): Frame | null {
    const size = this.map.getSize();
    const centre = this.view.getCenter();
    const resolution = this.view.getResolution();
    if (!size || !centre || !resolution) return null;
    const [width, height] = [size[0]!, size[1]!];
    return {
      resolution,
      left: centre[0]! - (width / 2) * resolution,
      top: -centre[1]! - (height / 2) * resolution,
      width,
      height,
    };
  }

  get level(): number {
    return this.layer ? levelFor(this.view.getResolution() ?? 1, this.layer.length) : 0;
  }

  /** Zoom by a factor about an entry, or about the centre. */
  zoom(factor: number, about: { query: number; key: number } | null): void {
    this.view.set(WHOLE, false);
    const anchor = about && [about.key + 0.5, -about.query - 0.5];
    this.view.adjustZoom(Math.log2(factor), anchor ?? undefined);
  }

  /** Move just as far as needed for an entry to be seen. */
  reveal(query: number, key: number): void {
    const frame = this.frame();
    const centre = this.view.getCenter();
    if (!frame || !centre) return;
    const inset = 24 * frame.resolution;
    const [spanX, spanY] = [frame.width * frame.resolution, frame.height * frame.resolution];
    this.view.set(WHOLE, false);
    const clamp = (value: number, least: number, most: number) => Math.min(Math.max(value, least), most);
    const left = clamp(frame.left, key + 1 + inset - spanX, key - inset);
    const top = clamp(frame.top, query + 1 + inset - spanY, query - inset);
    this.view.setCenter([left + spanX / 2, -top - spanY / 2]);
  }

  resize(): void {
    this.map.updateSize();
    if (showsWhole(this.view)) this.fit();
  }

  /** The picture as it is on the screen. */
  canvas(): HTMLCanvasElement | null {
    return this.map.getViewport().querySelector("canvas");
  }

  dispose(): void {
    this.map.setTarget(undefined);
    this.map.dispose();
  }

  private tiles(layer: Layer, paint: Paint): TileLayer {
    const top = topLevel(layer.length);
    const resolutions = Array.from({ length: top + 1 }, (_, z) => 2 ** (top - z));
    const extent = [0, -layer.length, layer.length, 0];
    const source = new ImageTile({
      projection,
      interpolate: false,
      wrapX: false,
      transition: 0,
      zDirection: 1, // cells are drawn a pixel wide or wider: a single column, such as a sink, cannot vanish
      tileGrid: new TileGrid({ extent, origin: [0, 0], resolutions, tileSize: TILE }),
      loader: async (z, column, row, { signal }) => {
        const tile = { level: top - z, row, column };
        try {
          return this.coloured(await cache.get(tileName(layer, tile), tile, layer.load, signal), paint);
        } catch (error) {
          if (!signal?.aborted) this.onError(error);
          throw error;
        }
      },
    });
    return new TileLayer({ source, extent });
  }

  private coloured(values: Float32Array, paint: Paint): HTMLCanvasElement {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = TILE;
    const pixels = new ImageData(colourTile(values, paint.plane, paint.norm, paint.palette), TILE, TILE);
    canvas.getContext("2d")!.putImageData(pixels, 0, 0);
    return canvas;
  }
}

function samePaint(a: Paint, b: Paint): boolean {
  return a.plane === b.plane && a.palette === b.palette && a.norm.low === b.norm.low && a.norm.high === b.norm.high && a.norm.log === b.norm.log;
}
